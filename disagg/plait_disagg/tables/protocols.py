"""The interface of embedding tables: several lookups at once, wherever the rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from plait_disagg.tables.values import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRequest:
    """One lookup of a batch. `ids` are int64 or int32: (nnz,) with `offsets` (rows + 1,) for bags, any shape without.

    `weights` (nnz,) float32 multiply the rows of a bag (mode sum only).
    """

    table: str
    mode: Mode
    ids: torch.Tensor
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupBags:
    """One pooled lookup of a batch whose bags lie where its requests have them: `ids` and `offsets` of each request."""

    table: str
    mode: Mode
    ids: tuple[torch.Tensor, ...]
    offsets: tuple[torch.Tensor, ...]


class BadId(Exception):
    """An id is outside a table whose policy is to reject it."""

    def __init__(self, *, table: str, value: int, position: int, rows: int) -> None:
        super().__init__(f"table {table}: id {value} at position {position} is outside 0..{rows - 1}")
        self.table = table
        self.value = value
        self.position = position


class ShardLost(Exception):
    """No replica of a shard can be reached, or none answered in time; one may answer again after `back_in_s`."""

    def __init__(self, shard: str, why: str, *, back_in_s: float | None = None) -> None:
        super().__init__(f"{shard}: {why}")
        self.back_in_s = back_in_s


class ShardRefused(Exception):
    """A shard understood the lookup but cannot serve it, say for a piece that it does not have: a mistake of ours."""

    def __init__(self, shard: str, why: str) -> None:
        super().__init__(f"{shard}: {why}")


class OtherVersion(Exception):
    """A shard has another version of the rows than it was asked for: a refresh is on its way. Ask again."""

    def __init__(self, shard: str, *, asked: str, has: str) -> None:
        super().__init__(f"{shard} has version {has}, not {asked}")


class Tables(Protocol):
    """Embedding tables. Not thread-safe: one thread owns them."""

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Look up rows, as float32 in the order of `requests`: (rows, D) pooled; mode rows: ids' shape + (D,).

        An empty bag is zeros. Ids outside a table follow its policy. Raises `BadId`.
        """


class ShardTables(Protocol):
    """The pieces of one shard, which may be in another process: several shards are asked at once.

    Pooled lookups of a piece return (bags, columns) float32; mode rows, whose ids are (n,), returns the rows as they
    are stored, (n, stored columns): they cross as small as they are, and whoever asks decodes or pools them.
    """

    def begin(self, requests: Sequence[LookupRequest], version: str) -> Callable[[], list[torch.Tensor]]:
        """Send a lookup of rows of that version without waiting. Raises `ShardLost`.

        What is returned waits for the answer; call it once. It raises `OtherVersion`, `ShardLost`, `ShardRefused`.
        """
