"""The definition of adding residuals: one readable line each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait_kernels.residual_add import check_residuals


def residual_add_(skip: torch.Tensor, residuals: Sequence[torch.Tensor]) -> None:
    """Compute `skip += sum_i r_i`; see `ResidualAddOp`. A fp64 skip is summed in fp64."""
    check_residuals(skip, residuals)
    wide = torch.promote_types(skip.dtype, torch.float32)
    total = skip.to(wide)
    for residual in residuals:
        total = total + residual.to(wide)
    skip.copy_(total)
