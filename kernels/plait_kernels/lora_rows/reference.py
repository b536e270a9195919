"""The definition of row-wise LoRA: one product after the other, row by row."""

from __future__ import annotations

import torch

from plait_kernels.lora_rows import check_rows


def add_(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compute `y += (x @ A) @ B` per row; see `LoraRowsOp`. In fp32; fp64 in fp64 (the truth in tests)."""
    check_rows(y, x, a, b)
    wide = torch.promote_types(y.dtype, torch.float32)
    for row in range(x.shape[0]):
        own = row if a.shape[0] > 1 else 0
        y[row] += ((x[row].to(wide) @ a[own].to(wide)) @ b[own].to(wide)).to(y.dtype)
