"""Check that an update fits a package. Every fault is a `BadUpdate` that names the table or the constant."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from plait_disagg.graph.small_tables import rows_name
from plait_disagg.package.halves import RowsByTable
from plait_disagg.package.read import Package
from plait_disagg.refresh.errors import BadUpdate
from plait_disagg.refresh.update import Update, UpdatedRows
from plait_disagg.tables.formats import LAYOUTS, decode_rows, encode_rows
from plait_disagg.tables.storage import TablePlace, TableSet
from plait_disagg.tables.values import Table

RowWrites = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By group: the rows of its matrix, (k,) int64, ascending, and their new contents, (k, columns)."""


def checked(package: Package, update: Update, version: str) -> RowWrites:
    """Return the update's rows as the package's tables store them.

    Raises `BadUpdate` if the update does not fit the package or does not build on `version`. Reads no row of the
    package.
    """
    manifest = package.manifest
    if update.version == manifest.version:
        raise BadUpdate("update.json.version", f"{update.version} is the version that was packaged")
    if update.model != manifest.name:
        raise BadUpdate("update.json.model", f"is for {update.model}, not {manifest.name}")
    if update.base != version:
        raise BadUpdate("update.json.base", f"goes on from version {update.base}; the model is at {version}")
    for name in update.constants.keys() & {rows_name(table) for table in package.hn_tables}:
        raise BadUpdate(f"constants.{name}", "is a table: give its rows")
    _check_constants(package, update)
    if not update.rows:
        return {}
    if not package.tables.is_writable:
        raise BadUpdate("rows", "vm.overcommit_memory=2 allows this process no private copy of tables of this size")
    pieces: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, rows in update.rows.items():
        place = _place(package.tables, name)
        pieces.setdefault(place.group.name, []).append((rows.ids + place.first, _encoded(place, rows)))
    return {group: _ascending(some) for group, some in pieces.items()}


def _check_constants(package: Package, update: Update) -> None:
    """Check the constants of an update: the halves must read at least one of them."""
    for name, tensor in update.constants.items():
        where = f"constants.{name}"
        old = package.constants.get(name)
        if old is None:
            raise BadUpdate(where, "the package has no such constant")
        if tensor.shape != old.shape or tensor.dtype != old.dtype:
            detail = f"is {tensor.dtype} {tuple(tensor.shape)}; the package has {old.dtype} {tuple(old.shape)}"
            raise BadUpdate(where, detail)
        if tensor.is_floating_point():
            _check_finite(where, tensor)
    used = {port.name for port in (*package.cn.constants, *package.hn.constants)}
    if update.constants and used.isdisjoint(update.constants):
        # Packaging takes layers apart; an update that only has the module's own weights would change nothing.
        raise BadUpdate("constants", "neither half of the model reads any of these")


def _place(tables: TableSet, name: str) -> TablePlace:
    if name not in tables.places:
        names = ", ".join(sorted(tables.places))
        raise BadUpdate(f"rows.{name}", f"the package has no such table; it has {names}"[:500])
    return tables.places[name]


def decoded_rows(update: Update, tables: TableSet, names: Collection[str]) -> RowsByTable:
    """Return the update's rows of those tables in float32, with the bits that a lookup would give. Raises
    `BadUpdate`."""
    mine = {name: (_place(tables, name), rows) for name, rows in update.rows.items() if name in names}
    return {
        name: (rows.ids, decode_rows(_encoded(place, rows), place.group.format)) for name, (place, rows) in mine.items()
    }


def _check_ids(table: Table, rows: UpdatedRows) -> None:
    where, ids = f"rows.{table.name}.ids", rows.ids
    if ids.dtype != torch.int64 or ids.dim() != 1 or not ids.numel():
        raise BadUpdate(where, f"must be (k,) int64 with at least one, not {tuple(ids.shape)} {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= table.rows:
        raise BadUpdate(where, f"id {low if low < 0 else high} is outside 0..{table.rows - 1}")
    if torch.unique(ids).numel() != ids.numel():
        raise BadUpdate(where, "an id is there twice")


def _encoded(place: TablePlace, given: UpdatedRows) -> torch.Tensor:
    """Encode rows as the group stores them. Stored rows must not hold NaN either: int8 rows have a scale and a bias."""
    table, group, row_format = place.table, place.group, place.group.format
    _check_ids(table, given)
    where, rows, layout = f"rows.{table.name}.rows", given.rows, LAYOUTS[row_format]
    count, columns = given.ids.numel(), group.dim + layout.extra_columns
    if rows.dtype == torch.float32 and tuple(rows.shape) == (count, table.dim):
        _check_finite(where, rows)
        try:
            rows = encode_rows(rows, row_format)
        except ValueError as error:
            raise BadUpdate(where, str(error)) from error
    elif rows.dtype != layout.dtype or tuple(rows.shape) != (count, columns):
        detail = f"{tuple(rows.shape)} {rows.dtype} is neither ({count}, {table.dim}) float32 nor"
        raise BadUpdate(where, f"{detail} ({count}, {columns}) {layout.dtype}, as the table stores it ({row_format})")
    rows = rows.contiguous()
    _check_finite(where, rows if rows.is_floating_point() else rows[:, table.dim :].contiguous().view(torch.float32))
    return rows


def _check_finite(where: str, numbers: torch.Tensor) -> None:
    if not bool(torch.isfinite(numbers).all()):
        raise BadUpdate(where, "a number is NaN or infinite")


def _ascending(pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort rows in the order of the matrix, so that writing passes through memory once."""
    ids = torch.cat([piece[0] for piece in pieces])
    rows = torch.cat([piece[1] for piece in pieces])
    order = torch.argsort(ids)
    return ids[order], rows[order]
