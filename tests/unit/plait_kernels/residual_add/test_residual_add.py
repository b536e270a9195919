"""Residuals onto skips: every form against fp64, in place, in every pair of layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from plait_kernels.registry import KernelError
from suites.operators import DTYPES, check_residuals, chosen_on_a_gpu, fuzz, residual_case

pytest.importorskip("triton", reason="needs triton: make setup-kernels")

from plait_kernels.residual_add import reference, triton_impl  # after the skip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = {"reference": reference.residual_add_, "triton": triton_impl.residual_add_}


@pytest.fixture(params=FORMS)
def residual_add_(request: pytest.FixtureRequest):
    """Every form."""
    return FORMS[request.param]


def test_only_the_rows_given_are_written(residual_add_):
    """A request's rows are a slice of the batch's skip; the neighbours keep theirs."""
    skip, residuals = residual_case((6, 4, 3, 5), 2, torch.float32, DEVICE, layouts="ll")
    kept = skip.clone()
    check_residuals(residual_add_, (skip[2:4], [one[:2] for one in residuals]))
    assert torch.equal(skip[:2], kept[:2])
    assert torch.equal(skip[4:], kept[4:])
    assert not torch.equal(skip[2:4], kept[2:4])


def test_a_skip_with_gaps_is_written_too(residual_add_):
    """Memory that is dense in no order."""
    skip, residuals = residual_case((2, 4, 3, 6), 1, torch.float32, DEVICE)
    check_residuals(residual_add_, (skip[..., ::2], [one[..., ::2] for one in residuals]))


def test_what_does_not_fit_is_refused(residual_add_):
    """Another shape."""
    skip, residuals = residual_case((2, 4, 3, 5), 2, torch.float32, DEVICE)
    with pytest.raises(ValueError, match="does not fit"):
        residual_add_(skip, [residuals[0], residuals[1][:1]])


def test_five_residuals_are_the_references():
    """The kernel has four arguments for them: the registry knows, and the form says so itself."""
    assert chosen_on_a_gpu("residual_add", torch.float16, residuals=5) == "reference"
    assert chosen_on_a_gpu("residual_add", torch.float16, residuals=4) == "triton"
    with pytest.raises(KernelError, match="takes residuals up to 4"):
        chosen_on_a_gpu("residual_add", torch.float16, "triton", residuals=5)
    with pytest.raises(ValueError, match="up to 4"):
        triton_impl.residual_add_(*residual_case((1, 2), 5, torch.float32, DEVICE))


@fuzz
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(0, 4), st.sampled_from(DTYPES),
    st.sampled_from(["cc", "cl", "lc", "ll"]), st.integers(0, 99),
)  # fmt: skip
@example([2, 4, 33, 31], 4, torch.float16, "lc", 0)  # more than a program takes
def test_every_form_is_the_formula(shape, count, dtype, layouts, seed):
    """One rounding from fp64 on any shape: elements are matched by place, not by memory order."""
    for form in FORMS.values():
        check_residuals(form, residual_case(shape, count, dtype, DEVICE, layouts=layouts, seed=seed))
