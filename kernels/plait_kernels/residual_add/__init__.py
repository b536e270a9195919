"""Several ControlNets' residuals onto a skip connection, in place: the operator's interface. `reference` defines it.

`skip[row] += sum_i scale_i[row] * r_i[row]`. Source: Zhang et al., Adding Conditional Control to Text-to-Image
Diffusion Models (arXiv 2302.05543); several add up, each with the scale that its request gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class ResidualAddOp(Protocol):
    """Summed in fp32 in list order, rounded once, written in place."""

    def __call__(self, skip: torch.Tensor, residuals: Sequence[torch.Tensor], scales: torch.Tensor) -> None:
        """Mutate `skip (R, ...)` (same storage, strides kept). `residuals`: k tensors of its shape; `scales`
        `fp32 (k, R)`. Raises ValueError for shapes that do not fit."""


def check_residuals(skip: torch.Tensor, residuals: Sequence[torch.Tensor], scales: torch.Tensor) -> None:
    """Raise ValueError for shapes that do not fit."""
    for residual in residuals:
        if residual.shape != skip.shape:
            raise ValueError(f"a residual of {tuple(residual.shape)} does not fit a skip of {tuple(skip.shape)}")
    if scales.shape != (len(residuals), skip.shape[0]):
        raise ValueError(f"{len(residuals)} residuals of {skip.shape[0]} rows do not have {tuple(scales.shape)} scales")
