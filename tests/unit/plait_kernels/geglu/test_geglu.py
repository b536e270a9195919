"""GEGLU: its definition against diffusers, every form against fp64. Without a GPU, Triton interprets its kernels."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.activations import GEGLU
from hypothesis import given

from plait_kernels.registry import load
from suites.operators import check_geglu, chosen_on_a_gpu, fuzz, geglu_inputs

pytest.importorskip("triton", reason="needs triton: make setup-kernels")

from plait_kernels.geglu import reference, triton_impl  # after the skip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = {"reference": reference.geglu, "triton": triton_impl.geglu}


@pytest.fixture(params=FORMS)
def geglu(request: pytest.FixtureRequest):
    """Every form."""
    return FORMS[request.param]


def test_the_definition_is_what_diffusers_computes():
    """Bit for bit in fp32: hidden first, gate second, the exact gelu."""
    module = GEGLU(8, 12)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(reference.geglu(module.proj(x)), module(x))


def test_a_transposed_input_is_read_by_its_strides(geglu):
    """No form takes memory order for logical order."""
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(1)).to(DEVICE).t()
    check_geglu(geglu, x)


@pytest.mark.parametrize("value", [30.0, -30.0, 1e4, -1e4])
def test_far_gates_do_not_overflow(geglu, value):
    """gelu is the gate or zero far out, in fp16 too."""
    x = torch.tensor([[1.5, value]], dtype=torch.float16, device=DEVICE)
    assert geglu(x).tolist() == [[1.5 * value if value > 0 else 0.0]]


def test_an_odd_last_dimension_is_refused(geglu):
    """Half of it would be a guess."""
    for shape in ((4, 3), ()):
        with pytest.raises(ValueError, match="halves"):
            geglu(torch.zeros(shape, device=DEVICE))


@fuzz
@given(geglu_inputs(DEVICE))
def test_every_form_is_the_formula(x):
    """One rounding from fp64, on odd shapes, with and without gaps between rows, into poisoned memory."""
    for form in FORMS.values():
        check_geglu(form, x)


def test_the_registry_gives_a_cpu_the_reference():
    """Triton is a GPU's."""
    assert load("geglu", "cpu", torch.float32) is reference.geglu
    assert chosen_on_a_gpu("geglu", torch.float16) == "triton"
    assert chosen_on_a_gpu("geglu", torch.float64) == "reference"
