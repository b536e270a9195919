"""The records of embedding tables: how rows are stored and what is looked up. No I/O here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

RowFormat = Literal["float32", "float16", "int8"]
"""How a row is stored. int8: D unsigned bytes, then float32 scale and bias (Fused8BitRowwise of Caffe2 and PyTorch):
D + 8 bytes."""

Mode = Literal["rows", "sum", "mean", "max"]
"""What is made of the rows of ids: themselves, or one row of each bag."""

OutOfRange = Literal["error", "clip", "hash"]
"""What to do with an id that is negative or at least the number of rows: reject the request, use the nearest row, or
choose a row by hash."""

Count = Annotated[int, Field(ge=1, lt=1 << 48)]
"""A number of rows or columns; a file that says another is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table of the model; `name` is the module's dotted name (`tables.genres`)."""

    name: Annotated[str, Field(min_length=1)]
    rows: Count
    dim: Count
    out_of_range: OutOfRange = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGroup:
    """Tables of equal width and format: one matrix `(sum of rows, D)`, so that one fused lookup serves them all."""

    name: str
    dim: Count
    format: RowFormat


def row_bytes(dim: int, format: RowFormat) -> int:  # noqa: A002  (the word of the field)
    """Return the bytes of one stored row."""
    return {"float32": 4 * dim, "float16": 2 * dim, "int8": dim + 8}[format]
