"""What one shard holds of a model's tables: whole tables and ranges of rows in the mapped file, columns as copies.

A range of rows is a view: nothing is read until it is looked up, and processes of a machine share its pages. Columns of
a row lie between others, so they are copied once, or the shard would keep all of the row in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from plait_disagg.tables.formats import LAYOUTS
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.ids import ids_in_range
from plait_disagg.tables.plan import TablePiece
from plait_disagg.tables.protocols import LookupRequest
from plait_disagg.tables.storage import TablePlace, TableSet
from plait_disagg.tables.values import Table, TableGroup


class HeldPieces:
    """The pieces of one shard. Not thread-safe."""

    def __init__(self, stored: TableSet, pieces: Sequence[TablePiece]) -> None:
        """Take the pieces from `stored`; columns are copied now."""
        self._sources = [(piece, stored.places[piece.table]) for piece in pieces]
        places: dict[str, TablePlace] = {}
        matrices: dict[str, torch.Tensor] = {}
        copied: dict[TableGroup, int] = {}
        for piece, home in self._sources:
            group, first = home.group, home.first + piece.first_row
            if piece.columns == group.dim:
                matrices[group.name] = stored.matrices[group.name]
            else:
                name = f"{group.format}_{piece.columns}_columns"
                group = TableGroup(name=name, dim=piece.columns, format=group.format)
                first = copied.get(group, 0)
                copied[group] = first + piece.rows
            table = Table(name=piece.name, rows=piece.rows, dim=piece.columns)
            places[piece.name] = TablePlace(table, group, first)
        for group, rows in copied.items():
            layout = LAYOUTS[group.format]
            matrices[group.name] = torch.empty(rows, group.dim + layout.extra_columns, dtype=layout.dtype)
        for piece, home in self._sources:
            place = places[piece.name]
            if place.group is not home.group:
                first = home.first + piece.first_row
                whole = stored.matrices[home.group.name][first : first + piece.rows]
                mine = matrices[place.group.name][place.first : place.first + piece.rows]
                mine[:, : piece.columns] = whole[:, piece.first_column : piece.first_column + piece.columns]
                mine[:, piece.columns :] = whole[:, home.group.dim :]
        self._held = TableSet(places=places, matrices=matrices)
        self._pooled = FusedTables(self._held)

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Look up as `ShardTables` defines. Raises `BadId`, ValueError."""
        bags = [request for request in requests if request.mode != "rows"]
        pooled = iter(self._pooled.lookup(bags) if bags else ())
        return [next(pooled) if request.mode != "rows" else self._stored(request) for request in requests]

    def _stored(self, request: LookupRequest) -> torch.Tensor:
        place = self._held.places.get(request.table)
        if place is None:
            raise ValueError(f"there is no piece {request.table}")
        ids = torch.from_numpy(ids_in_range(request.ids.numpy(), place.table))
        return self._held.matrices[place.group.name].index_select(0, ids + place.first)

    def writes(
        self, rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield what to write here of new rows of the whole tables (`refresh.check.RowWrites`): matrix, ids, rows."""
        for piece, home in self._sources:
            ids, new = rows.get(home.group.name, (None, None))
            if ids is None or new is None:
                continue
            first, place = home.first + piece.first_row, self._held.places[piece.name]
            mine = (ids >= first) & (ids < first + piece.rows)
            if bool(mine.any()):
                matrix = self._held.matrices[place.group.name]
                yield matrix, ids[mine] - first + place.first, _columns(new[mine], piece, home.group)


def _columns(rows: torch.Tensor, piece: TablePiece, group: TableGroup) -> torch.Tensor:
    """Return a piece's part of stored rows: its columns, and what each row has besides them (scale and bias)."""
    if piece.columns == group.dim:
        return rows
    return torch.cat(
        [rows[:, piece.first_column : piece.first_column + piece.columns], rows[:, group.dim :]], dim=1
    ).contiguous()
