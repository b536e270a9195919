"""Merging a LoRA set into weights of the sizes of Stable Diffusion 1.5, and what a whole set at once would be."""

from __future__ import annotations

import torch

from plait_bench.kernels.cases import Arguments, OperatorCase
from plait_kernels.lora_merge import MergeOp, Term
from plait_kernels.registry import load

__all__ = ["merge_cases"]

_RANK = 16
_TERMS = 2
_WEIGHTS = 16  # of 640 x 640 in a UNet's middle levels: attention's four in four transformer blocks
TRIED = "tried"


def merge_cases() -> list[OperatorCase]:
    """Return one large weight, and a set's many weights of one shape."""
    return [_merge(1, 1280), _whole_set(_WEIGHTS, 640)]


def _merge(count: int, width: int) -> OperatorCase:
    return OperatorCase(
        name=f"lora-merge-sd15-{width}",
        op="lora_merge",
        moved=2 * count * width * width,
        make=lambda device, dtype: _arguments(count, width, device, dtype),
        plait=_one_by_one,
        eager=_as_diffusers,
        compiles=False,
    )


def _whole_set(count: int, width: int) -> OperatorCase:
    """`eager`: what runs today, a product for each weight."""
    return OperatorCase(
        name=f"tried-lora-merge-{count}x{width}",
        op="lora_merge",
        moved=2 * count * width * width,
        make=lambda device, dtype: _arguments(count, width, device, dtype),
        plait=None,
        eager=_one_by_one,
        others={TRIED: lambda: _at_once},
        compiles=False,
    )


def _arguments(count: int, width: int, device: str, dtype: torch.dtype) -> Arguments:
    """Weights, pristine weights, ups `(w, r)` and downs `(r, w)`: lists, LoRA after LoRA for each weight."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype) * 0.01

    weights = [drawn(width, width) for _ in range(count)]
    ups = [drawn(width, _RANK) for _ in range(count * _TERMS)]
    downs = [drawn(_RANK, width) for _ in range(count * _TERMS)]
    return weights, [weight.clone() for weight in weights], ups, downs


Tensors = list[torch.Tensor]


def _one_by_one(weights: Tensors, pristine: Tensors, ups: Tensors, downs: Tensors) -> torch.Tensor:
    op: MergeOp = load("lora_merge", weights[0].device.type, weights[0].dtype)
    for i, (weight, own) in enumerate(zip(weights, pristine, strict=True)):
        terms = [Term(up=ups[k], down=downs[k], c=0.5) for k in range(i * _TERMS, (i + 1) * _TERMS)]
        op(weight, own, terms, proven_finite=True)
    return weights[-1]


def _as_diffusers(weights: Tensors, pristine: Tensors, ups: Tensors, downs: Tensors) -> torch.Tensor:
    """Add LoRA after LoRA to a copy, then look at all of it (peft's `merge` with `safe_merge`)."""
    for i, (weight, own) in enumerate(zip(weights, pristine, strict=True)):
        total = own.clone()
        for k in range(i * _TERMS, (i + 1) * _TERMS):
            total += (ups[k] @ downs[k]) * 0.5
        assert torch.isfinite(total).all()
        weight.copy_(total)
    return weights[-1]


def _at_once(weights: Tensors, pristine: Tensors, ups: Tensors, downs: Tensors) -> torch.Tensor:
    """All weights of a shape as one batched product: few launches, but they are not beside each other in memory."""
    count, width = len(weights), len(weights[0])
    up = torch.stack(ups).view(count, _TERMS, width, _RANK).movedim(1, 2).flatten(2)
    down = torch.stack(downs).view(count, _TERMS * _RANK, width)
    made = torch.baddbmm(torch.stack(pristine), up, down, alpha=0.5)
    torch._foreach_copy_(weights, list(made.unbind()))
    return weights[-1]
