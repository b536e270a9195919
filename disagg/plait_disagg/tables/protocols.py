"""The seam of embedding tables: several lookups at once, wherever the rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from plait_disagg.tables.values import Lookup

__all__ = ["AsyncTables", "BadId", "LookupRequest", "LookupResult", "PendingLookup", "Tables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRequest:
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
        self.rows = rows


class Tables(Protocol):
    """Embedding tables. Not thread-safe: one thread owns it."""

    def lookup(self, asks: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Float32, in the order of ``asks``: (rows, D) pooled; mode rows: ids' shape + (D,). An empty bag is zeros.

        Ids outside a table follow its policy. Raises `BadId`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """A shard's answer: as `Tables.lookup` has it, all of one ``version`` of the rows."""

    shard: str
    version: int
    values: list[torch.Tensor]


class PendingLookup(Protocol):
    """A lookup that a shard works on."""

    def result(self) -> LookupResult:
        """Waits for the answer; call it once. Raises `BadId`, `ShardLost`, `ShardRefused`."""


@runtime_checkable
class AsyncTables(Tables, Protocol):
    """Tables elsewhere, which several shards can be asked for at once."""

    def begin(self, asks: Sequence[LookupRequest]) -> PendingLookup:
        """Asks, and does not wait. Of several that are begun, only the last one can still be answered. Raises
        `ShardLost`."""
