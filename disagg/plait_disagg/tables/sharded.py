"""Tables on several shards, queried as one.

Each shard implements `Tables` and names its pieces as in `TablePiece.name`. A lookup queries every shard once;
remote ones (`AsyncTables`) work at the same time, and must answer from one version of their rows. Pieces split by
columns are concatenated; pieces split by rows receive their own ids and are merged by mode: sums are added (and
divided by the bag's size for means), maxima compared, rows put where their ids were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from plait_disagg.tables.errors import MixedVersions
from plait_disagg.tables.ids import settle_ids
from plait_disagg.tables.plan import ShardPlan, TablePiece
from plait_disagg.tables.protocols import AsyncTables, LookupRequest, Tables
from plait_disagg.tables.values import Mode, Table

__all__ = ["ShardedTables", "piece_of"]

_TRIES = 3
"""How many times a lookup is attempted while a refresh moves through the shards and they answer from different
versions."""


def piece_of(piece: TablePiece, table: torch.Tensor) -> torch.Tensor:
    """Return the part of a table's rows (rows, D) that a piece holds, as a view."""
    rows = table[piece.first_row : piece.first_row + piece.rows]
    return rows[:, piece.first_column : piece.first_column + piece.columns]


@dataclass(frozen=True, slots=True)
class _Part:
    """The lookup for one piece. `keep`: which ids of the request were its own (row splits only)."""

    piece: TablePiece
    request: LookupRequest
    keep: NDArray[np.bool_] | None


class ShardedTables:
    """The `Tables` of several shards. The policy for ids outside a table is applied here, before shards are queried."""

    def __init__(self, tables: Sequence[Table], plan: ShardPlan, shards: Sequence[Tables]) -> None:
        if len(shards) != plan.shards:
            raise ValueError(f"the plan is for {plan.shards} shards, not {len(shards)}")
        self._tables: Mapping[str, Table] = {table.name: table for table in tables}
        self._pieces = {table.name: plan.of_table(table.name) for table in tables}
        self._shards = shards

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Look up rows at the shards and merge them. Raises `BadId`, `ShardLost`, `MixedVersions`."""
        parts = [self._parts(request) for request in requests]
        found = self._ask_shards([part for some in parts for part in some])
        values = []
        start = 0
        for request, some in zip(requests, parts, strict=True):
            values.append(_merge(request, some, found[start : start + len(some)]))
            start += len(some)
        return values

    def _parts(self, request: LookupRequest) -> list[_Part]:
        table = self._tables[request.lookup.table]
        ids = torch.from_numpy(settle_ids(request.ids.long().numpy(), table))
        settled = replace(request, ids=ids)
        return [_part(settled, piece, table) for piece in self._pieces[table.name]]

    def _ask_shards(self, parts: Sequence[_Part]) -> list[torch.Tensor]:
        """Send one lookup to each shard involved; return the values in the order of `parts`."""
        by_shard: dict[int, list[int]] = {}
        for position, part in enumerate(parts):
            by_shard.setdefault(part.piece.shard, []).append(position)
        requests = {shard: [parts[position].request for position in by_shard[shard]] for shard in sorted(by_shard)}
        values = self._lookup_all(requests)
        found: dict[int, torch.Tensor] = {}
        for shard, positions in by_shard.items():
            found.update(zip(positions, values[shard], strict=True))
        return [found[position] for position in range(len(parts))]

    def _lookup_all(self, requests: Mapping[int, Sequence[LookupRequest]]) -> dict[int, list[torch.Tensor]]:
        """Return each shard's values. Those of this process are looked up while the others work."""
        near = {shard: tables for shard in requests if not isinstance(tables := self._shards[shard], AsyncTables)}
        far = {shard: tables for shard in requests if isinstance(tables := self._shards[shard], AsyncTables)}
        values: dict[int, list[torch.Tensor]] = {}
        for _ in range(_TRIES):
            pending = {shard: tables.begin(requests[shard]) for shard, tables in far.items()}
            values |= {shard: near[shard].lookup(requests[shard]) for shard in near.keys() - values.keys()}
            found = {shard: one.result() for shard, one in pending.items()}
            if len({one.version for one in found.values()}) <= 1:
                return values | {shard: one.values for shard, one in found.items()}
        raise MixedVersions({one.shard: one.version for one in found.values()})


def _part(request: LookupRequest, piece: TablePiece, table: Table) -> _Part:
    if piece.rows == table.rows:
        return _Part(piece, _asking(request, piece, request.lookup.mode), None)
    ids = request.ids.numpy()
    keep = (ids >= piece.first_row) & (ids < piece.first_row + piece.rows)
    own = replace(
        request,
        ids=torch.from_numpy(ids[keep] - piece.first_row),
        offsets=None if request.offsets is None else _own_offsets(request.offsets, keep),
        weights=None if request.weights is None else request.weights[torch.from_numpy(keep)],
    )
    # A mean over part of a bag is of no use: the parts' sums are.
    mode: Mode = "sum" if request.lookup.mode == "mean" else request.lookup.mode
    return _Part(piece, _asking(own, piece, mode), keep)


def _asking(request: LookupRequest, piece: TablePiece, mode: Mode) -> LookupRequest:
    return replace(request, lookup=replace(request.lookup, table=piece.name, mode=mode))


def _own_offsets(offsets: torch.Tensor, keep: NDArray[np.bool_]) -> torch.Tensor:
    """Return the bags' offsets when only the ids of `keep` are left."""
    kept = np.zeros(keep.size + 1, dtype=np.int64)
    np.cumsum(keep, out=kept[1:])
    return torch.from_numpy(kept[offsets.numpy()])


def _merge(request: LookupRequest, parts: Sequence[_Part], values: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    if parts[0].keep is None:
        return torch.cat(list(values), dim=-1)
    if request.lookup.mode == "rows":
        return _merge_rows(request, parts, values)
    if request.lookup.mode == "max":
        return _merge_maxima(parts, values)
    total = torch.stack(list(values)).sum(0)
    return total if request.lookup.mode == "sum" else total / _sizes(request).clamp(min=1).unsqueeze(1)


def _merge_rows(request: LookupRequest, parts: Sequence[_Part], values: Sequence[torch.Tensor]) -> torch.Tensor:
    merged = torch.empty((*request.ids.shape, values[0].shape[-1]))
    for part, value in zip(parts, values, strict=True):
        assert part.keep is not None
        merged[torch.from_numpy(part.keep)] = value
    return merged


def _merge_maxima(parts: Sequence[_Part], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return elementwise maxima over the parts that have ids of a bag; zeros for a bag that has none anywhere."""
    sizes = [_sizes(part.request).unsqueeze(1) for part in parts]
    some = [value.masked_fill(size == 0, -torch.inf) for value, size in zip(values, sizes, strict=True)]
    is_empty = torch.stack(sizes).sum(0) == 0
    return torch.stack(some).amax(0).masked_fill(is_empty, 0.0)


def _sizes(request: LookupRequest) -> torch.Tensor:
    assert request.offsets is not None
    return request.offsets.diff()
