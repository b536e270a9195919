"""How rows are stored: floats to stored rows and back, and pooled as they are (R rows of D values, n ids, B bags).

x: a row of D floats; x': what is read back. u = 2^-24, the unit roundoff of float32.

- float32: bit-exact.
- float16: round to nearest; abs(x - x') <= max(2^-11 abs(x), 2^-25). Values beyond 65504 are rejected.
- int8 (Fused8BitRowwise of Caffe2 and PyTorch, `torch.ops.quantized.embedding_bag_byte_prepack`): range = max - min of
  the row, scale = range / 255, bias = min, q = round((x - bias) * 255 / (range + 1e-8)), x' = q * scale + bias. Stored
  as D bytes q, then float32 scale, then float32 bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait_disagg.tables.values import Mode, RowFormat
from plait_kernels.int8_lookup import SCALE_AND_BIAS_BYTES, Int8LookupOp
from plait_kernels.registry import load


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """A format as a matrix: its dtype and the columns that a row has in addition to its D values."""

    dtype: torch.dtype
    extra_columns: int = 0


LAYOUTS: dict[RowFormat, RowLayout] = {
    "float32": RowLayout(dtype=torch.float32),
    "float16": RowLayout(dtype=torch.float16),
    "int8": RowLayout(dtype=torch.uint8, extra_columns=SCALE_AND_BIAS_BYTES),
}


def encode_rows(rows: torch.Tensor, format: RowFormat) -> torch.Tensor:  # noqa: A002  (the word of the field)
    """Encode (n, D) float32 as (n, columns) of the layout's dtype; float32 is returned unchanged.

    Raises ValueError for a value that the format cannot hold (NaN and infinities in int8, more than 65504 in
    float16).
    """
    if rows.dtype != torch.float32 or rows.dim() != 2:
        raise ValueError(f"rows must be (n, D) float32, not {tuple(rows.shape)} {rows.dtype}")
    rows = rows.detach().contiguous()
    if format == "float32":
        return rows
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(f"a value is NaN or infinite, which {format} rows cannot hold")
    if format == "float16":
        half = rows.half()
        if not bool(torch.isfinite(half).all()):
            raise ValueError("a value is beyond 65504, the largest of float16")
        return half
    if rows.shape[0] == 0:
        return torch.empty((0, rows.shape[1] + SCALE_AND_BIAS_BYTES), dtype=torch.uint8)
    packed: torch.Tensor = torch.ops.quantized.embedding_bag_byte_prepack(rows)
    return packed


def decode_rows(stored: torch.Tensor, format: RowFormat) -> torch.Tensor:  # noqa: A002
    """Decode what `encode_rows` stored to (n, D) float32; float32 is returned unchanged."""
    if format == "float32":
        return stored
    if format == "float16":
        return stored.float()
    if stored.shape[0] == 0:
        return torch.empty((0, stored.shape[1] - SCALE_AND_BIAS_BYTES))
    floats: torch.Tensor = torch.ops.quantized.embedding_bag_byte_unpack(stored)
    return floats


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
