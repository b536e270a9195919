"""The LoRA merge operator: what every implementation writes, and what it does not; `test_difference` has its values."""

from __future__ import annotations

import math
import pkgutil

import pytest
import torch

from plait_kernels.lora_merge import Term, is_finite
from plait_kernels.registry import IMPLS

torch.set_num_threads(1)


@pytest.fixture(params=[impl for impl in IMPLS if impl.op == "lora_merge"], ids=lambda impl: impl.name)
def merge_(request: pytest.FixtureRequest):
    """Every registered implementation; a new one is tested by being registered."""
    return pkgutil.resolve_name(request.param.entry)


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
