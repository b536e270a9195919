"""Tables on several shards, queried as one. Results have the bits of `FusedTables` over the whole tables.

A lookup asks every shard that has ids of it, all at once, for rows of one version. A table that is whole on a shard, or
split by columns, is pooled there and the columns are put side by side. Rows of one that is split by rows come as they
are stored and are pooled here, by the same operator in the same order: sums of partial sums would round otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from plait_disagg.tables.formats import LAYOUTS, decode_rows, pool
from plait_disagg.tables.ids import ids_in_range
from plait_disagg.tables.plan import ShardPlan, TablePiece
from plait_disagg.tables.protocols import LookupRequest, ShardRefused, ShardTables
from plait_disagg.tables.values import RowFormat, Table


@dataclass(frozen=True, slots=True)
class _Part:
    """The lookup for one piece. `keep`: which ids of the request are its own (row splits only)."""

    piece: TablePiece
    request: LookupRequest
    keep: NDArray[np.bool_] | None


class ShardedTables:
    """The `Tables` of several shards. The policy for ids outside a table is applied here, before shards are queried."""

    def __init__(
        self, tables: Sequence[Table], formats: Mapping[str, RowFormat], plan: ShardPlan, shards: Sequence[ShardTables]
    ) -> None:
        """Ask `shards` for rows of `version`, which may be changed between two lookups. `formats`: by table."""
        if len(shards) != plan.shards:
            raise ValueError(f"the plan is for {plan.shards} shards, not {len(shards)}")
        self._tables: Mapping[str, Table] = {table.name: table for table in tables}
        self._formats = formats
        self._pieces = {table.name: plan.of_table(table.name) for table in tables}
        self._shards = shards
        self.version = ""

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Look up rows at the shards and merge them. Raises `BadId`, `OtherVersion`, `ShardLost`, `ShardRefused`."""
        parts = [self._parts(request) for request in requests]
        found = iter(self._ask_shards([part for some in parts for part in some]))
        values = [[next(found) for _ in some] for some in parts]
        return [self._merge(*one) for one in zip(requests, parts, values, strict=True)]

    def _parts(self, request: LookupRequest) -> list[_Part]:
        table = self._tables.get(request.table)
        if table is None:
            raise ValueError(f"there is no table {request.table}")
        ids = torch.from_numpy(ids_in_range(request.ids.reshape(-1).long().numpy(), table))
        inside = replace(request, ids=ids)
        return [self._part(inside, piece, table) for piece in self._pieces[table.name]]

    def _part(self, request: LookupRequest, piece: TablePiece, table: Table) -> _Part:
        if piece.rows == table.rows:
            return _Part(piece, replace(request, table=piece.name), None)
        ids = request.ids.numpy()
        keep = (ids >= piece.first_row) & (ids < piece.first_row + piece.rows)
        own = torch.from_numpy(ids[keep] - piece.first_row)
        return _Part(piece, LookupRequest(table=piece.name, mode="rows", ids=own), keep)

    def _ask_shards(self, parts: Sequence[_Part]) -> list[torch.Tensor]:
        """Send one lookup to each shard that has ids; return the values in the order of `parts`."""
        by_shard: dict[int, list[int]] = {}
        for position, part in enumerate(parts):
            if part.request.ids.numel():
                by_shard.setdefault(part.piece.shard, []).append(position)
        pending = [
            (positions, self._shards[shard].begin([parts[at].request for at in positions], self.version))
            for shard, positions in by_shard.items()
        ]
        found: dict[int, torch.Tensor] = {}
        for positions, result in pending:
            found.update(zip(positions, result(), strict=True))
        return [self._checked(part, found.get(position)) for position, part in enumerate(parts)]

    def _checked(self, part: _Part, value: torch.Tensor | None) -> torch.Tensor:
        """Return the value of a part, which is empty where there was nothing to ask."""
        request, piece = part.request, part.piece
        if request.mode == "rows":
            layout = LAYOUTS[self._formats[piece.table]]
            shape, dtype = (request.ids.numel(), piece.columns + layout.extra_columns), layout.dtype
        else:
            assert request.offsets is not None
            shape, dtype = (request.offsets.numel() - 1, piece.columns), torch.float32
        if value is None:
            return torch.zeros(shape, dtype=dtype)
        if tuple(value.shape) != shape or value.dtype is not dtype:
            raise ShardRefused(str(piece.shard), f"it sent {value.dtype} {tuple(value.shape)} for {dtype} {shape}")
        return value

    def _merge(self, request: LookupRequest, parts: Sequence[_Part], values: Sequence[torch.Tensor]) -> torch.Tensor:
        row_format, mode = self._formats[request.table], request.mode
        if parts[0].keep is not None:
            stored = torch.empty((request.ids.numel(), values[0].shape[1]), dtype=values[0].dtype)
            for part, value in zip(parts, values, strict=True):
                stored[torch.from_numpy(part.keep)] = value
            if mode != "rows":
                return self._pooled(request, stored, row_format)
            values = [stored]
        if mode == "rows":
            values = [decode_rows(value, row_format) for value in values]
        merged = values[0] if len(values) == 1 else torch.cat(list(values), dim=-1)
        return merged.view(*request.ids.shape, merged.shape[-1]) if mode == "rows" else merged

    def _pooled(self, request: LookupRequest, stored: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
        assert request.offsets is not None
        places, offsets = torch.arange(len(stored)), request.offsets.long()
        return pool(stored, row_format, places, offsets, mode=request.mode, weights=request.weights)
