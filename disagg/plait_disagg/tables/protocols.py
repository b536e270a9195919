"""The seam of embedding tables: several lookups at once, wherever the rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from plait_disagg.tables.values import Lookup

__all__ = ["Ask", "BadId", "Tables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One lookup of a batch. ``ids`` int64 or int32: (nnz,) with ``offsets`` (rows + 1,) for bags, any shape without.

    ``weights`` (nnz,) float32 multiply the rows of a bag (mode sum only).
    """

    lookup: Lookup
    ids: torch.Tensor
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None


class BadId(Exception):
    """An id is outside a table whose policy is to refuse it."""

    def __init__(self, *, table: str, value: int, position: int, rows: int) -> None:
        super().__init__(f"table {table}: id {value} at position {position} is outside 0..{rows - 1}")
        self.table = table
        self.value = value
        self.position = position


class Tables(Protocol):
    """Embedding tables. Not thread-safe: one thread owns it."""

    def lookup(self, asks: Sequence[Ask]) -> list[torch.Tensor]:
        """Float32, in the order of ``asks``: (rows, D) pooled; mode rows: ids' shape + (D,). An empty bag is zeros.

        Ids outside a table follow its policy. Raises `BadId`.
        """
