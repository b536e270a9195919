"""GroupNorm + SiLU: every form against fp64. Without a GPU, Triton interprets its kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

from suites.operators import DTYPES, NORM_SHAPES, check_norm, chosen_on_a_gpu, fuzz, norm_case, norm_cases

pytest.importorskip("triton", reason="needs triton: make setup-kernels")

from plait_kernels.group_norm_silu import reference, triton_impl  # after the skip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = {"reference": reference.group_norm_silu, "triton": triton_impl.group_norm_silu}


@pytest.fixture(params=FORMS)
def norm(request: pytest.FixtureRequest):
    """Every form."""
    return FORMS[request.param]


def test_the_definition_is_torchs():
    """Bit for bit in fp32, time embedding added before the norm."""
    case = norm_case((2, 12, 5, 4, 3), torch.float32, "cpu", addend=True)
    v = functional.group_norm(case["x"] + case["addend"][:, :, None, None], 3, case["weight"], case["bias"], 1e-5)
    assert torch.equal(reference.group_norm_silu(**case), functional.silu(v))


@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_every_form_is_the_formula(norm, shape):
    """One rounding from fp64, on odd shapes, into poisoned memory."""
    for i, dtype in enumerate(DTYPES):
        check_norm(norm, norm_case(shape, dtype, DEVICE, layout="channels_last", addend=i != 1), silu=i != 2)


def test_values_far_from_zero_keep_their_variance(norm):
    """A mean of ten thousand standard deviations: sums of squares would leave nothing of it in fp32."""
    check_norm(norm, norm_case((1, 8, 16, 16, 2), torch.float32, DEVICE, offset=1e4))


def test_one_far_value_spoils_no_other_group(norm):
    """An outlier, first of its piece: the value that the others' distances are taken of."""
    case = norm_case((1, 6, 9, 9, 2), torch.float32, DEVICE)
    case["x"][0, 0, 0, 0] = 3e4
    check_norm(norm, case)


def test_a_constant_image_is_the_bias(norm):
    """Variance zero divides by sqrt(eps), not by zero: what equals the mean gives the bias exactly."""
    case = norm_case((1, 8, 4, 4, 2), torch.float32, DEVICE)
    case["x"] = torch.full_like(case["x"], 0.7)
    y = norm(**case, silu=False)
    assert torch.allclose(y, case["bias"][None, :, None, None].expand_as(y), atol=2e-4, rtol=0)


def test_more_pixels_than_one_piece_holds(norm):
    """Several pieces, two tiles a piece, the last one ragged."""
    check_norm(norm, norm_case((1, 130, 37, 31, 1), torch.float32, DEVICE, layout="channels_last", addend=True))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": 3}, "groups of one size"),
        ({"weight": torch.ones(7)}, "weight is"),
        ({"addend": torch.ones(1, 8)}, "addend is"),
        ({"x": torch.ones(2, 8, 4)}, "takes"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(norm, change, reason):
    """Before anything is read out of bounds."""
    case = norm_case((2, 8, 4, 4, 2), torch.float32, "cpu")
    with pytest.raises(ValueError, match=reason):
        norm(**{**case, **change})


@settings(fuzz, max_examples=40)
@given(norm_cases(DEVICE))
def test_forms_do_not_differ(case):
    """All forms, in every layout, on whatever hypothesis thinks of."""
    for form in FORMS.values():
        check_norm(form, case)


def test_a_gpu_computes_by_the_kernel():
    """In the dtypes that images are made in."""
    assert chosen_on_a_gpu("group_norm_silu", torch.float16) == "triton"
    assert chosen_on_a_gpu("group_norm_silu", torch.float64) == "reference"


@pytest.mark.parametrize(("shape", "elements"), [((2, 8, 4, 4, 2), 255), ((1, 1025, 1, 2, 1), 2**30)])
def test_what_the_kernel_cannot_take_is_computed_by_the_reference(monkeypatch, shape, elements):
    """More elements than offsets reach, and groups that do not fit into registers."""
    monkeypatch.setattr(triton_impl, "channel_statistics", None)
    monkeypatch.setattr(triton_impl, "_MAX_ELEMENTS", elements)
    check_norm(triton_impl.group_norm_silu, norm_case(shape, torch.float32, "cpu", addend=True))
