"""Several ControlNets' residuals onto a skip connection, in place: the operator's interface. `reference` defines it.

`skip += sum_i r_i`. Source: Zhang et al., Adding Conditional Control to Text-to-Image Diffusion Models (arXiv
2302.05543); several add up, each scaled where it was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class ResidualAddOp(Protocol):
    """Summed in fp32 in list order, rounded once, written in place."""

    def __call__(self, skip: torch.Tensor, residuals: Sequence[torch.Tensor]) -> None:
        """Mutate `skip (R, ...)` (same storage, strides kept). `residuals`: tensors of its shape. Raises ValueError for
        shapes that do not fit."""


def check_residuals(skip: torch.Tensor, residuals: Sequence[torch.Tensor]) -> None:
    """Raise ValueError for shapes that do not fit."""
    for residual in residuals:
        if residual.shape != skip.shape:
            raise ValueError(f"a residual of {tuple(residual.shape)} does not fit a skip of {tuple(skip.shape)}")
