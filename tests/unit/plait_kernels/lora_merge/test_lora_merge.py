"""The LoRA merge operator: what every implementation writes, and what it does not; `test_difference` has its values."""

from __future__ import annotations

import math

import pytest
import torch

from plait_kernels.lora_merge import Term, is_finite
from plait_kernels.registry import IMPLS, load

torch.set_num_threads(1)


def case(shape: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype, seed: int = 0):
    """A pristine weight and terms of about its size."""
    generator = torch.Generator().manual_seed(seed)
    width = math.prod(shape[1:])
    terms = [
        Term(
            up=torch.randn(shape[0], rank, generator=generator).half(),
            down=torch.randn(rank, width, generator=generator).half(),
            c=0.3 * (-1) ** i / math.sqrt(rank),
        )
        for i, rank in enumerate(ranks)
    ]
    return torch.randn(shape, generator=generator).to(dtype), terms


def truth(pristine: torch.Tensor, terms: list[Term]) -> torch.Tensor:
    """The formula in fp64."""
    total = pristine.double().flatten(1)
    for term in terms:
        total = total + term.c * (term.up.double() @ term.down.double())
    return total.reshape(pristine.shape)


@pytest.fixture(params=[impl for impl in IMPLS if impl.op == "lora_merge"], ids=lambda impl: impl.name)
def merge_(request: pytest.FixtureRequest):
    """Every registered implementation; a new one is tested by being registered."""
    return load("lora_merge", "cpu", torch.float32, request.param.name)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_weight_is_written_in_place(merge_, memory_format):
    """Address and strides stay: compiled graphs and other holders of the tensor see the merge."""
    pristine, terms = case((8, 6, 3, 3), (2, 3), torch.float16)
    weight = pristine.clone(memory_format=memory_format)
    kept = pristine.clone(memory_format=memory_format)
    address, strides = weight.data_ptr(), weight.stride()
    merge_(weight, kept, terms)
    assert (weight.data_ptr(), weight.stride()) == (address, strides)
    assert torch.equal(kept, pristine)
    assert torch.allclose(weight.double(), truth(pristine, terms), rtol=1e-3, atol=1e-3)


def test_no_terms_restore_bit_for_bit(merge_):
    """An empty set is the pristine weight, also its negative zeros."""
    pristine = torch.tensor([[0.0, -0.0], [1.5, -2.25]], dtype=torch.bfloat16)
    weight = torch.ones_like(pristine)
    merge_(weight, pristine, [])
    assert torch.equal(weight.view(torch.int16), pristine.view(torch.int16))


@pytest.mark.parametrize(("up", "down"), [((7, 2), (3, 5)), ((6, 2), (2, 5)), ((7, 2), (2, 4)), ((7, 2, 1), (2, 5))])
def test_factors_that_do_not_fit_are_refused(merge_, up, down):
    """Wrong shapes raise ValueError instead of broadcasting."""
    weight = torch.zeros(7, 5)
    with pytest.raises(ValueError, match="do not fit"):
        merge_(weight, torch.ones(7, 5), [Term(up=torch.ones(up), down=torch.ones(down), c=1.0)])
    assert not weight.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_is_finite_is_isfinite(dtype):
    """The quick look finds what torch.isfinite finds, wherever in the tensor it is."""
    clean = torch.randn(37, 91).to(dtype)
    assert is_finite(clean)
    assert is_finite(torch.empty(0, 3, dtype=dtype))
    for bad in (math.nan, math.inf, -math.inf):
        for position in (0, 1, 63, 64, 1000, clean.numel() - 1):
            spoilt = clean.clone()
            spoilt.view(-1)[position] = bad
            assert not is_finite(spoilt)
