"""The definition of a LoRA merge: one readable line per LoRA. The naive counterpart of `concat`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait_kernels.lora_merge import Term, check_terms


def merge_(weight: torch.Tensor, pristine: torch.Tensor, terms: Sequence[Term]) -> None:
    """Compute `W <- cast(W0 + sum_i c_i * B_i @ A_i)`; see `MergeOp`. fp64 weights are summed in fp64 (the ground truth
    in tests)."""
    check_terms(pristine, terms)
    wide = torch.promote_types(pristine.dtype, torch.float32)
    total = pristine.to(wide, copy=True)
    for term in terms:
        up, down = term.up.to(pristine.device, wide), term.down.to(pristine.device, wide)
        total += term.c * (up @ down).reshape(pristine.shape)
    weight.copy_(total)
