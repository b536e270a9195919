"""Merge a whole LoRA set into one weight: the operator's interface. `reference.merge_` is its definition.

Symbols: W0 pristine weight `(o, i)` or `(o, i, kh, kw)`; D = i * kh * kw; r rank; per LoRA A `(r, D)`, B `(o, r)`
and one number c = scale * alpha / r.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Term:
    """One LoRA's contribution to one weight: `c * up @ down`. up `(o, r)`, down `(r, D)`, any float dtype, any device.

    A convolution's `down` is its `(r, i, kh, kw)` factor flattened from dimension 1.
    """

    up: torch.Tensor
    down: torch.Tensor
    c: float


class MergeOp(Protocol):
    """`W <- cast(W0 + sum_i c_i * B_i @ A_i)`, summed in fp32, cast once, written in place."""

    def __call__(self, weight: torch.Tensor, pristine: torch.Tensor, terms: Sequence[Term]) -> None:
        """Mutate `weight` (same storage, strides kept), never `pristine`; both have the same shape, dtype and device.

        Without terms, `weight` becomes `pristine` bit for bit. Raises ValueError for terms that do not fit the weight.
        Whether the result is finite is the caller's to know: a GPU never waits for the host.
        """


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite, by `aminmax`, which propagates NaN and is much faster than
    `isfinite` on a CPU.

    1280x5120 fp32, one core: 1.5 ms against 71 ms.
    """
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def check_terms(pristine: torch.Tensor, terms: Sequence[Term]) -> None:
    """Check that every term's product has the weight's size. Raises ValueError if not."""
    o, d = pristine.shape[0], pristine.shape[1:].numel()
    for term in terms:
        if term.down.shape[1:] != (d,) or term.up.shape != (o, term.down.shape[0]):
            up, down = tuple(term.up.shape), tuple(term.down.shape)
            raise ValueError(f"factors {up} x {down} do not fit a weight of {tuple(pristine.shape)}")
