"""What one shard holds of a model's tables: whole tables and ranges of rows in the mapped file, columns as copies.

A range of rows is a view: nothing is read until it is looked up, and processes of a machine share its pages. Columns of
a row lie between others, so they are copied once, or the shard would keep all of the row in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from plait_disagg.tables.formats import LAYOUTS
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.plan import TablePiece
from plait_disagg.tables.protocols import BadId, LookupRequest
from plait_disagg.tables.storage import TableSet
from plait_disagg.tables.values import GroupSlice, RowFormat, Table, TableGroup


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
        homes = {part.table: (group, part.first) for group in stored.groups for part in group.slices}
        self._places: dict[str, _PiecePlace] = {}
        groups: dict[str, TableGroup] = {}
        matrices: dict[str, torch.Tensor] = {}
        for name, held, matrix in (*_views(stored, pieces, homes), *_copies(stored, pieces, homes)):
            matrices[name] = matrix
            groups[name] = held[0][1]
            slices = []
            for piece, _, first in held:
                source, source_first = homes[piece.table]
                slices.append(GroupSlice(table=piece.name, first=first, rows=piece.rows))
                self._places[piece.name] = _PiecePlace(
                    piece=piece,
                    matrix=matrix,
                    first=first,
                    source=source,
                    source_first=source_first + piece.first_row,
                )
            groups[name] = replace(groups[name], name=name, dim=held[0][0].columns, slices=tuple(slices))
        tables = tuple(Table(name=piece.name, rows=piece.rows, dim=piece.columns) for piece in pieces)
        self._pooled = FusedTables(TableSet(tables=tables, groups=tuple(groups.values()), matrices=matrices))

    @property
    def names(self) -> frozenset[str]:
        """The names of the pieces."""
        return frozenset(self._places)

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Look up as `ShardTables` defines. Raises `BadId`, ValueError."""
        bags = [request for request in requests if request.lookup.mode != "rows"]
        pooled = iter(self._pooled.lookup(bags) if bags else ())
        return [next(pooled) if request.lookup.mode != "rows" else self._stored(request) for request in requests]

    def _stored(self, request: LookupRequest) -> torch.Tensor:
        place = self._places.get(request.lookup.table)
        if place is None:
            raise ValueError(f"there is no piece {request.lookup.table}")
        ids = request.ids
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= place.piece.rows):
            odd = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise BadId(table=place.piece.name, value=odd, position=0, rows=place.piece.rows)
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


_Held = list[tuple[TablePiece, TableGroup, int]]
"""Pieces of one matrix, each with the group that it comes from, and its first row in the matrix."""


def _views(
    stored: TableSet, pieces: Sequence[TablePiece], homes: Mapping[str, tuple[TableGroup, int]]
) -> Iterable[tuple[str, _Held, torch.Tensor]]:
    found: dict[str, _Held] = {}
    for piece in pieces:
        group, first = homes[piece.table]
        if piece.columns == group.dim:
            found.setdefault(group.name, []).append((piece, group, first + piece.first_row))
    return [(name, held, stored.matrices[name]) for name, held in found.items()]


def _copies(
    stored: TableSet, pieces: Sequence[TablePiece], homes: Mapping[str, tuple[TableGroup, int]]
) -> Iterable[tuple[str, _Held, torch.Tensor]]:
    found: dict[tuple[RowFormat, int], _Held] = {}
    rows: dict[tuple[RowFormat, int], int] = {}
    for piece in pieces:
        group, _ = homes[piece.table]
        if piece.columns < group.dim:
            key = group.format, piece.columns
            found.setdefault(key, []).append((piece, group, rows.setdefault(key, 0)))
            rows[key] += piece.rows
    made = []
    for key, held in found.items():
        layout = LAYOUTS[key[0]]
        matrix = torch.empty((rows[key], key[1] + layout.extra_columns), dtype=layout.dtype)
        for piece, group, first in held:
            source = homes[piece.table][1] + piece.first_row
            whole = stored.matrices[group.name][source : source + piece.rows]
            last = piece.first_column + piece.columns
            matrix[first : first + piece.rows, : piece.columns] = whole[:, piece.first_column : last]
            matrix[first : first + piece.rows, piece.columns :] = whole[:, group.dim :]
        made.append((f"{key[0]}_{key[1]}_columns", held, matrix))
    return made


def _columns(rows: torch.Tensor, piece: TablePiece, group: TableGroup) -> torch.Tensor:
    """Return a piece's part of stored rows: its columns, and what each row has besides them (scale and bias)."""
    if piece.columns == group.dim:
        return rows
    return torch.cat(
        [rows[:, piece.first_column : piece.first_column + piece.columns], rows[:, group.dim :]], dim=1
    ).contiguous()
