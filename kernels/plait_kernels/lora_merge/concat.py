"""A LoRA set as one matrix product: `W0 + [c_1 B_1 | c_2 B_2 | ...] @ [A_1; A_2; ...]`.

Equal to the reference except for the order of fp32 additions. It needs one product instead of one per LoRA, and the
addition of W0 is fused into it (addmm), so there is one pass over the weight instead of one per LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait_kernels.lora_merge import Term, check_terms


def merge_(weight: torch.Tensor, pristine: torch.Tensor, terms: Sequence[Term]) -> None:
    """Compute `W <- cast(W0 + sum_i c_i * B_i @ A_i)`; see `MergeOp`."""
    if not terms:
        weight.copy_(pristine)
        return
    check_terms(pristine, terms)
    device = pristine.device
    ups = [term.up.to(device, torch.float32) * term.c for term in terms]
    downs = [term.down.to(device, torch.float32) for term in terms]
    up, down = (ups[0], downs[0]) if len(terms) == 1 else (torch.cat(ups, dim=1), torch.cat(downs))
    if weight.dtype is torch.float32 and weight.is_contiguous() and pristine.is_contiguous():
        torch.addmm(pristine.flatten(1), up, down, out=weight.flatten(1))  # flatten of contiguous memory is a view
    else:
        weight.copy_(torch.addmm(pristine.flatten(1).float(), up, down).view(weight.shape))
