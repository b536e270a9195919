"""The interface of embedding tables: several lookups at once, wherever the rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from plait_disagg.tables.values import Lookup

__all__ = ["AsyncTables", "BadId", "LookupRequest", "LookupResult", "PendingLookup", "Tables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRequest:
    """One lookup of a batch. `ids` are int64 or int32: (nnz,) with `offsets` (rows + 1,) for bags, any shape without.

    `weights` (nnz,) float32 multiply the rows of a bag (mode sum only).
    """

    lookup: Lookup
    ids: torch.Tensor
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None


class BadId(Exception):
    """An id is outside a table whose policy is to reject it."""

    def __init__(self, *, table: str, value: int, position: int, rows: int) -> None:
        super().__init__(f"table {table}: id {value} at position {position} is outside 0..{rows - 1}")
        self.table = table
        self.value = value
        self.position = position
        self.rows = rows


class Tables(Protocol):
    """Embedding tables. Not thread-safe: one thread owns them."""

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Look up rows, as float32 in the order of `asks`: (rows, D) pooled; mode rows: ids' shape + (D,).

        An empty bag is zeros. Ids outside a table follow its policy. Raises `BadId`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """A shard's answer: as returned by `Tables.lookup`, all of one `version` of the rows."""

    shard: str
    version: int
    values: list[torch.Tensor]


class PendingLookup(Protocol):
    """A lookup in flight at a shard."""

    def result(self) -> LookupResult:
        """Wait for the answer; call it once. Raises `BadId`, `ShardLost`, `ShardRefused`."""


@runtime_checkable
class AsyncTables(Tables, Protocol):
    """Tables in another process, so that several shards can be queried at once."""

    def begin(self, requests: Sequence[LookupRequest]) -> PendingLookup:
        """Send a lookup without waiting. If several have begun, only the last one can still be answered.

        Raises `ShardLost`.
        """
