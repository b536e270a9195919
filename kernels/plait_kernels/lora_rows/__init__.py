"""Row-wise LoRA: rows with different LoRA sets share a layer's product, and each adds its own: the interface.

`y[row] += (x[row] @ A[row]) @ B[row]`; scales are folded into the factors. `reference.add_` defines it. Source: Hu et
al., LoRA (arXiv 2106.09685); rows with adapters of their own as in Chen et al., Punica (arXiv 2310.18547).
"""

from __future__ import annotations

from typing import Protocol

import torch


class LoraRowsOp(Protocol):
    """Written in place; products accumulate in fp32 at least."""

    def __call__(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Mutate `y (R, S, out)`. `x (R, S, in)`, `a (R, in, r)`, `b (R, r, out)`; one row of factors, `(1, ...)`, is
        every row's. All of one dtype. Raises ValueError for shapes that do not fit."""


def check_rows(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise ValueError for shapes that do not fit."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (y, x, a, b))
    if any(tensor.ndim != 3 for tensor in (y, x, a, b)):
        raise ValueError(f"row-wise LoRA takes four tensors of three dimensions, not {shapes}")
    fits = (
        y.shape[:2] == x.shape[:2]
        and a.shape[0] == b.shape[0]
        and a.shape[0] in {1, x.shape[0]}
        and a.shape[1:] == (x.shape[2], b.shape[1])
        and b.shape[2] == y.shape[2]
    )
    if not fits:
        raise ValueError(f"y, x, A, B of {shapes} do not fit each other")
