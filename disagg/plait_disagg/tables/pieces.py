"""What one shard holds of a model's tables: whole tables and ranges of rows in the mapped file, columns as copies.

A range of rows is a view: nothing is read until it is looked up, and processes of a machine share its pages. Columns of
a row lie between others, so they are copied once, or the shard would keep all of the row in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch

from plait_disagg.tables.formats import LAYOUTS
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.ids import ids_in_range
from plait_disagg.tables.plan import TablePiece
from plait_disagg.tables.protocols import LookupRequest
from plait_disagg.tables.storage import TableSet
from plait_disagg.tables.values import GroupSlice, Table, TableGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _PiecePlace:
    """Where a piece is: from row `first` of `matrix` here, from row `source_first` of group `source` in the file."""

    piece: TablePiece
    matrix: torch.Tensor
    first: int
    source: TableGroup
    source_first: int


class HeldPieces:
    """The pieces of one shard. Not thread-safe."""

    def __init__(self, stored: TableSet, pieces: Sequence[TablePiece]) -> None:
        """Take the pieces from `stored`; columns are copied now."""
        homes = stored.places
        together: dict[str, list[TablePiece]] = {}
        for piece in pieces:
            group = homes[piece.table].group
            is_view = piece.columns == group.dim
            name = group.name if is_view else f"{group.format}_{piece.columns}_columns"
            together.setdefault(name, []).append(piece)
        self._places: dict[str, _PiecePlace] = {}
        groups: list[TableGroup] = []
        matrices: dict[str, torch.Tensor] = {}
        for name, some in together.items():
            group = homes[some[0].table].group
            columns, is_view, slices = some[0].columns, name in stored.matrices, list[GroupSlice]()
            if is_view:
                matrix = stored.matrices[name]
            else:
                layout, rows = LAYOUTS[group.format], sum(piece.rows for piece in some)
                matrix = torch.empty(rows, columns + layout.extra_columns, dtype=layout.dtype)
            for piece in some:
                home = homes[piece.table]
                source, source_first = home.group, home.first + piece.first_row
                first = source_first if is_view else sum(part.rows for part in slices)
                if not is_view:
                    whole = stored.matrices[source.name][source_first : source_first + piece.rows]
                    mine = matrix[first : first + piece.rows]
                    mine[:, :columns] = whole[:, piece.first_column : piece.first_column + columns]
                    mine[:, columns:] = whole[:, source.dim :]
                slices.append(GroupSlice(table=piece.name, first=first, rows=piece.rows))
                self._places[piece.name] = _PiecePlace(
                    piece=piece, matrix=matrix, first=first, source=source, source_first=source_first
                )
            matrices[name] = matrix
            groups.append(replace(group, name=name, dim=columns, slices=tuple(slices)))
        tables = tuple(Table(name=piece.name, rows=piece.rows, dim=piece.columns) for piece in pieces)
        self._pooled = FusedTables(TableSet(tables=tables, groups=tuple(groups), matrices=matrices))

    @property
    def names(self) -> Set[str]:
        """The names of the pieces."""
        return self._places.keys()

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Look up as `ShardTables` defines. Raises `BadId`, ValueError."""
        bags = [request for request in requests if request.lookup.mode != "rows"]
        pooled = iter(self._pooled.lookup(bags) if bags else ())
        return [next(pooled) if request.lookup.mode != "rows" else self._stored(request) for request in requests]

    def _stored(self, request: LookupRequest) -> torch.Tensor:
        place = self._places.get(request.lookup.table)
        if place is None:
            raise ValueError(f"there is no piece {request.lookup.table}")
        table = Table(name=place.piece.name, rows=place.piece.rows, dim=place.piece.columns)
        ids = torch.from_numpy(ids_in_range(request.ids.numpy(), table))
        return place.matrix.index_select(0, ids + place.first)

    def writes(
        self, rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield what to write here of new rows of the whole tables (`refresh.check.RowWrites`): matrix, ids, rows."""
        for place in self._places.values():
            piece, source = place.piece, place.source
            ids, new = rows.get(source.name, (None, None))
            if ids is None or new is None:
                continue
            mine = (ids >= place.source_first) & (ids < place.source_first + piece.rows)
            if bool(mine.any()):
                yield place.matrix, ids[mine] - place.source_first + place.first, _columns(new[mine], piece, source)


def _columns(rows: torch.Tensor, piece: TablePiece, group: TableGroup) -> torch.Tensor:
    """Return a piece's part of stored rows: its columns, and what each row has besides them (scale and bias)."""
    if piece.columns == group.dim:
        return rows
    return torch.cat(
        [rows[:, piece.first_column : piece.first_column + piece.columns], rows[:, group.dim :]], dim=1
    ).contiguous()
