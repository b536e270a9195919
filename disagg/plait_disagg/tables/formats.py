"""How rows are stored: floats to stored rows and back.

x: a row of D floats; x': what is read back. u = 2^-24, the unit roundoff of float32.

- float32: bit-exact.
- float16: round to nearest; abs(x - x') <= max(2^-11 abs(x), 2^-25). Values beyond 65504 are rejected.
- int8 (Fused8BitRowwise of Caffe2 and PyTorch, `torch.ops.quantized.embedding_bag_byte_prepack`): range = max - min of
  the row, scale = range / 255, bias = min, q = round((x - bias) * 255 / (range + 1e-8)), x' = q * scale + bias. Stored
  as D bytes q, then float32 scale, then float32 bias. `int8_error_bound` bounds the distance of x' from x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait_disagg.tables.values import RowFormat

_SCALE_AND_BIAS_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """A format as a matrix: its dtype and the columns that a row has in addition to its D values."""

    dtype: torch.dtype
    extra_columns: int = 0


LAYOUTS: dict[RowFormat, RowLayout] = {
    "float32": RowLayout(dtype=torch.float32),
    "float16": RowLayout(dtype=torch.float16),
    "int8": RowLayout(dtype=torch.uint8, extra_columns=_SCALE_AND_BIAS_BYTES),
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
        return torch.empty((0, rows.shape[1] + _SCALE_AND_BIAS_BYTES), dtype=torch.uint8)
    packed: torch.Tensor = torch.ops.quantized.embedding_bag_byte_prepack(rows)
    return packed


def decode_rows(stored: torch.Tensor, format: RowFormat) -> torch.Tensor:  # noqa: A002
    """Decode what `encode_rows` stored to (n, D) float32; float32 is returned unchanged."""
    if format == "float32":
        return stored
    if format == "float16":
        return stored.float()
    if stored.shape[0] == 0:
        return torch.empty((0, stored.shape[1] - _SCALE_AND_BIAS_BYTES))
    floats: torch.Tensor = torch.ops.quantized.embedding_bag_byte_unpack(stored)
    return floats


def int8_error_bound(rows: torch.Tensor) -> torch.Tensor:
    """Return (n,) float32, the max error of any value of each row of (n, D).

    Half a step of the quantiser, the effect of the 1e-8 in the divisor (at most min(range, 1e-8)), and the roundings
    of q, q * scale and the sum: 4 u of the largest magnitude and of the range each.
    """
    low, high = torch.aminmax(rows, dim=1)
    spread = high - low
    largest = rows.abs().amax(dim=1)
    return spread / 510 + spread.clamp(max=1e-8) + 4 * 2.0**-24 * (largest + spread)
