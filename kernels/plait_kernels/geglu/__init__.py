"""GEGLU: `y = h * gelu(g)` for `[h | g] = x`: the operator's interface. `reference.geglu` is its definition.

`gelu(g) = g * (1 + erf(g / sqrt(2))) / 2`, the exact one. Source: Shazeer, GLU Variants Improve Transformer (arXiv
2002.05202); hidden first, gate second, as in diffusers' `GEGLU` after its projection.
"""

from __future__ import annotations

from typing import Protocol

import torch


class GegluOp(Protocol):
    """`(..., 2D) -> (..., D)`, computed in fp32 and rounded once."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new contiguous tensor of `x`'s dtype. Raises ValueError if the last dimension is odd."""


def check_halves(x: torch.Tensor) -> int:
    """Return D for `x (..., 2D)`. Raises ValueError if the last dimension is odd or there is none."""
    if not x.ndim or x.shape[-1] % 2:
        raise ValueError(f"GEGLU halves the last dimension; {tuple(x.shape)} has none that is even")
    return x.shape[-1] // 2
