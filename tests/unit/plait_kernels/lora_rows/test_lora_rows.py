"""Row-wise LoRA: every form against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait_kernels.lora_rows import batched, reference
from plait_kernels.registry import load
from support.kernels import DTYPES, check_lora, fuzz, lora_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = {"reference": reference.add_, "batched": batched.add_}


@pytest.fixture(params=FORMS)
def add_(request: pytest.FixtureRequest):
    """Every form."""
    return FORMS[request.param]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_form_is_the_formula(add_, dtype, shared):
    """Odd sizes, one token, one rank, no rows."""
    for rows, tokens, sides in ((3, 5, (7, 2, 11)), (1, 1, (1, 1, 1)), (2, 13, (64, 8, 48)), (0, 3, (4, 2, 4))):
        if rows or shared:
            check_lora(add_, lora_case(rows, tokens, sides, dtype, DEVICE, shared=shared))


def test_rows_have_their_own_sets(add_):
    """A row's result does not depend on its neighbours' factors."""
    y, x, a, b = lora_case(3, 4, (6, 2, 5), torch.float32, DEVICE, shared=False)
    alone = y[1:2].clone()
    add_(alone, x[1:2], a[1:2], b[1:2])
    add_(y, x, a, b)
    assert torch.allclose(y[1:2], alone, atol=1e-6)


def test_a_view_is_written_in_place(add_):
    """y may be a slice of a wider projection."""
    wide, x, a, b = lora_case(2, 4, (6, 2, 10), torch.float32, DEVICE, shared=True)
    kept = wide.clone()
    check_lora(add_, (wide[..., 5:], x, a, b[..., 5:]))
    assert torch.equal(wide[..., :5], kept[..., :5])


def test_what_does_not_fit_is_refused(add_):
    """Before anything is written."""
    y, x, a, b = lora_case(3, 4, (6, 2, 5), torch.float32, DEVICE, shared=False)
    for case in ((y, x, a[:2], b[:2]), (y, x, a, b[:1]), (y, x, b, a), (y[0], x[0], a[0], b[0])):
        with pytest.raises(ValueError, match=r"do not fit|three dimensions"):
            add_(*case)


@fuzz
@given(
    st.integers(1, 4), st.integers(0, 9), st.tuples(st.integers(1, 33), st.integers(1, 9), st.integers(1, 33)),
    st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_forms_do_not_differ(rows, tokens, sides, dtype, shared, seed):
    """All forms on any shape."""
    for form in FORMS.values():
        check_lora(form, lora_case(rows, tokens, sides, dtype, DEVICE, shared=shared, seed=seed))


def test_the_registry_prefers_batched_products():
    """On every device."""
    assert load("lora_rows", "cuda", torch.float16) is batched.add_
    assert load("lora_rows", "cpu", torch.float64) is reference.add_
