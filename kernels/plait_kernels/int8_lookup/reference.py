"""The definition of a pooled lookup in int8 rows: every row as floats, then a sum per bag."""

from __future__ import annotations

import torch

from plait_kernels.int8_lookup import SCALE_AND_BIAS_BYTES


def int8_lookup(
    table: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Look up and sum; see `Int8LookupOp`."""
    stored = table[ids]
    width = table.shape[1] - SCALE_AND_BIAS_BYTES
    own = stored[:, width:].clone(memory_format=torch.contiguous_format)  # at an offset that float32 may have
    scale, bias = own.view(torch.float32).reshape(-1, 2, 1).unbind(1)
    rows = stored[:, :width] * scale + bias
    if weights is not None:
        rows = rows * weights[:, None]
    bags = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=ids.device), offsets.diff())
    return rows.new_zeros(len(offsets) - 1, width).index_add_(0, bags, rows)
