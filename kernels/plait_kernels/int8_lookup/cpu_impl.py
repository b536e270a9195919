"""torch's own kernel, over the stored bytes: a quarter of float32's memory traffic, and no row is written as floats.

It is FBGEMM's `GenerateEmbeddingSpMDM` for bytes with scale and bias in the row, and bags are shared among all of
torch's threads, which fbgemm_gpu's CPU operators do not do within a table (pytorch 2.13
`aten/src/ATen/native/quantized/cpu/qembeddingbag.cpp`).
"""

from __future__ import annotations

import torch

_SUM = 0


def int8_lookup(
    table: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Look up and sum; see `Int8LookupOp`."""
    pooled: torch.Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        table, ids, offsets, False, _SUM, False, weights, None, True
    )
    return pooled
