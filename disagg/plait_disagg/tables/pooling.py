"""Pooling rows of one matrix by its format: the arithmetic behind the fused lookup.

Symbols: R rows of the matrix, D width, n ids, B bags. All results are float32.
"""

from __future__ import annotations

import torch

from plait_disagg.tables.formats import decode_rows
from plait_disagg.tables.values import Mode, RowFormat
from plait_kernels.int8_lookup import Int8LookupOp
from plait_kernels.registry import load

MODES: dict[Mode, int] = {"sum": 0, "mean": 1, "max": 2}
"""Pooling modes and their numbers in ATen."""


def take(matrix: torch.Tensor, row_format: RowFormat, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of `ids`, (n,) int64 inside the matrix, as (n, D)."""
    return decode_rows(torch.index_select(matrix, 0, ids), row_format)


def pool(
    matrix: torch.Tensor,
    row_format: RowFormat,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: Mode,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return pooled rows (B, D) for `ids` (n,) int64 inside the matrix, `offsets` (B + 1,) int64, `weights` (n,)
    float32.

    An empty bag is zeros. Float32 rows match `torch.nn.functional.embedding_bag` bit for bit; other formats are
    pooled in float32.
    """
    if row_format == "float32":
        return _bags(matrix, ids, offsets, mode, weights)
    if row_format == "int8" and mode != "max":
        op: Int8LookupOp = load("int8_lookup", matrix.device.type, torch.float32)
        pooled = op(matrix, ids, offsets, weights)
        return pooled if mode == "sum" else pooled / offsets.diff().clamp(min=1).unsqueeze(1)
    # PyTorch's bag kernel for float16 rounds the pooled row to float16 (and overflows at 65504), so the rows are pooled
    # in float32 instead. That is exact and about three times slower: float16 is for halving memory, int8 for speed too.
    rows = take(matrix, row_format, ids)
    return _bags(rows, torch.arange(len(ids)), offsets, mode, weights)


def _bags(
    matrix: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, mode: Mode, weights: torch.Tensor | None
) -> torch.Tensor:
    pooled: torch.Tensor = torch.embedding_bag(matrix, ids, offsets, False, MODES[mode], False, weights, True)[0]
    return pooled
