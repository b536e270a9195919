"""Row-wise LoRA as two batched products, the second of which adds into y; factors that all rows share make them plain
ones. The product with A is rounded to the dtype in between.

A kernel of its own would save writing and reading `(R, S, r)`, a few percent of `(R, S, in)` and `(R, S, out)`.
"""

from __future__ import annotations

import torch

from plait_kernels.lora_rows import check_rows


def add_(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compute `y += (x @ A) @ B` per row; see `LoraRowsOp`."""
    check_rows(y, x, a, b)
    if a.shape[0] == 1 and y.is_contiguous():
        y.view(-1, y.shape[2]).addmm_(x.reshape(-1, x.shape[2]) @ a[0], b[0])
        return
    rows = x.shape[0]
    y.baddbmm_(torch.bmm(x, a.expand(rows, -1, -1)), b.expand(rows, -1, -1))
