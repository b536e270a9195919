"""A process's own copy of a model: the halves that its worker needs, at the version given by the package's journal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from plait_disagg.package.halves import CompiledDense, CompiledSparse
from plait_disagg.package.manifest import PackageError
from plait_disagg.package.read import Package, open_package
from plait_disagg.refresh.check import RowWrites, checked, decoded_rows
from plait_disagg.refresh.errors import BadUpdate
from plait_disagg.refresh.journal import Journal
from plait_disagg.refresh.prepared_update import KEPT, PreparedUpdate, RowWrite
from plait_disagg.refresh.update import Update, read_update
from plait_disagg.tables.pieces import HeldPieces
from plait_disagg.tables.sharded import ShardedTables
from plait_disagg.values import ModelCard


class LivePackage:
    """A package with the updates applied so far. Not thread-safe.

    `sparse`: the CN half, or None; its tables are a private copy-on-write mapping of the package's file. `dense`:
    the HN half by dense version, newest last, or none. `tables`: where the CN half looks up, if that is at shards;
    `pieces`: what a shard holds.
    """

    def __init__(
        self,
        package: Package,
        *,
        sparse: CompiledSparse | None = None,
        dense: CompiledDense | None = None,
        tables: ShardedTables | None = None,
        pieces: HeldPieces | None = None,
    ) -> None:
        """Bring the halves, which are at the packaged version, to that of the journal. Raises `PackageError`."""
        self.package = package
        self.version = self.dense_version = package.manifest.version
        self.sparse, self.pieces, self._tables = sparse, pieces, tables
        if tables is not None:
            tables.version = self.version
        self.dense = {} if dense is None else {self.version: dense}
        self._cn_constants = frozenset(port.name for port in package.cn.constants)
        self._hn_constants = frozenset(port.name for port in package.hn.constants)
        self._hn_tables = package.hn_tables
        try:
            for path in Journal(package.folder).after(self.version):
                change = self.stage(self.read(path))
                change.write()
                self.adopt(change)
        except BadUpdate as error:
            raise PackageError(f"{package.folder}: an update of its journal cannot be read: {error}") from error

    def card(self, *, mode: str = "whole") -> ModelCard:
        """Return the card of the current version."""
        return self.package.card(mode=mode, version=self.version)

    def read(self, folder: Path) -> Update:
        """Read the parts of an update that this process needs. Raises `BadUpdate`."""
        return read_update(folder, rows=bool(self.sparse or self.pieces or self._hn_tables))

    def stage(self, update: Update) -> PreparedUpdate:
        """Return what the update changes here; nothing has changed yet. Raises `BadUpdate`."""
        holds_rows = self.pieces is not None or (self.sparse is not None and self._tables is None)
        mine = update if holds_rows else replace(update, rows={})
        rows = checked(self.package, mine, self.version)
        small = decoded_rows(update, self.package.stored, self._hn_tables) if self._hn_tables else {}
        new_dense = bool(small) or not self._hn_constants.isdisjoint(update.constants)
        new_sparse = self.sparse is not None and not self._cn_constants.isdisjoint(update.constants)
        return PreparedUpdate(
            version=update.version,
            dense_version=update.version if new_dense else self.dense_version,
            writes=self._writes(rows),
            row_ids={table: rows.ids for table, rows in update.rows.items()},
            sparse=self.sparse.with_constants(update.constants) if new_sparse and self.sparse is not None else None,
            dense=self.dense[self.dense_version].updated(update.constants, small) if new_dense and self.dense else None,
            on_write=None if self._tables is None else partial(setattr, self._tables, "version", update.version),
        )

    def _writes(self, rows: RowWrites) -> tuple[RowWrite, ...]:
        if self.pieces is not None:
            return tuple(RowWrite(matrix=matrix, ids=ids, rows=new) for matrix, ids, new in self.pieces.writes(rows))
        matrices = self.package.tables.matrices if rows else {}
        return tuple(RowWrite(matrix=matrices[group], ids=ids, rows=new) for group, (ids, new) in rows.items())

    def adopt(self, change: PreparedUpdate) -> None:
        """Record that the change was applied: the next update builds on it."""
        self.version, self.dense_version = change.version, change.dense_version
        if isinstance(change.sparse, CompiledSparse):
            self.sparse = change.sparse
        if isinstance(change.dense, CompiledDense):
            kept = [*self.dense.items(), (change.dense_version, change.dense)][-KEPT:]
            self.dense = dict(kept)


def open_live(
    folder: Path, *, sparse: bool, dense: bool, device: torch.device | str = "cpu", prepares: bool = False
) -> LivePackage:
    """Open halves of the package at `folder` with its own tables; `prepares`: see `Package.dense`. Raises
    `PackageError`."""
    package = open_package(folder)
    return LivePackage(
        package,
        sparse=package.sparse() if sparse else None,
        dense=package.dense(device, prepares=prepares) if dense else None,
    )
