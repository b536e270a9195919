"""A process's own copy of a model: the halves that its worker needs, at the version given by the package's journal; and
the worker's side of a refresh, which stages updates, switches to them, and follows the journal on its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from plait_disagg.package.halves import CompiledDense, CompiledSparse
from plait_disagg.package.manifest import PackageError
from plait_disagg.package.read import Package, open_package
from plait_disagg.refresh.check import RowWrites, checked, decoded_rows
from plait_disagg.refresh.errors import BadUpdate, NotPublished, RefreshError
from plait_disagg.refresh.journal import Journal
from plait_disagg.refresh.prepared_update import KEPT, PreparedUpdate, Refreshable, RowWrite
from plait_disagg.refresh.update import Update, read_update, read_update_manifest
from plait_disagg.tables.pieces import HeldPieces
from plait_disagg.tables.sharded import ShardedTables
from plait_disagg.values import ModelCard
from plait_kernels.threads import lower_priority, run_on_own_thread, set_threads

_log = logging.getLogger(__name__)


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


class Refresher:
    """Keeps a worker and its `LivePackage` at one version. Thread-safe: calls are serialized."""

    def __init__(
        self, live: LivePackage, worker: Refreshable, *, on_version: Callable[[str], None] = lambda _: None
    ) -> None:
        """Take over `live`, whose halves `worker` serves.

        `on_version` is called with every version that the worker has switched to.
        """
        self._live = live
        self._worker = worker
        self._on_version = on_version
        self._journal = Journal(live.package.folder)
        self._staged: PreparedUpdate | None = None
        self._refresh_lock = threading.Lock()

    @property
    def version(self) -> str:
        """The version that the worker serves."""
        return self._live.version

    def stage(self, folder: Path) -> None:
        """Prepare the update at `folder`; what is served stays. Raises `BadUpdate`."""
        with self._refresh_lock:
            manifest = read_update_manifest(folder)
            if manifest.version == self._live.version:
                return
            if manifest.base != self._live.version:
                self._follow()
            self._staged = run_on_own_thread(partial(self._prepared_quietly, folder))

    def switch(self, version: str) -> None:
        """Switch to the version that was staged or, after a restart or a publisher's death, is in the journal.

        Raises `NotPublished` if it is neither, `BadUpdate`.
        """
        with self._refresh_lock:
            staged, self._staged = self._staged, None
            if self._live.version == version:
                return
            if staged is not None and staged.version == version:
                self._apply_update(staged)
                return
            self._follow()
            if self._live.version != version:
                raise NotPublished(f"this worker is at version {self._live.version} and knows no way to {version}")

    def is_behind(self) -> bool:
        """Return whether the journal has updates that the worker does not serve yet. Reads one small file."""
        try:
            return bool(self._journal.after(self._live.version))
        except RefreshError:
            return False

    def catch_up(self) -> None:
        """Apply the journal's updates. Never raises: a worker that cannot keep its version and logs why."""
        try:
            with self._refresh_lock:
                self._follow()
        except (RefreshError, OSError) as error:
            _log.error("cannot follow the updates of %s: %s", self._live.package.folder, error)

    # With the turn.

    def _follow(self) -> None:
        self._staged = None
        for folder in self._journal.after(self._live.version):
            self._apply_update(self._prepared(folder))

    def _prepared_quietly(self, folder: Path) -> PreparedUpdate:
        """Prepare an update on one thread at low priority: nobody waits for it, and requests need the cores."""
        set_threads(1)
        lower_priority()
        return self._prepared(folder)

    def _prepared(self, folder: Path) -> PreparedUpdate:
        change = self._live.stage(self._live.read(folder))
        change.touch()  # while nobody writes: that is what the turn is for
        self._worker.prepare(change)
        return change

    def _apply_update(self, change: PreparedUpdate) -> None:
        self._worker.apply_update(change)
        self._live.adopt(change)
        _log.info("%s is at version %s", self._live.package.manifest.name, change.version)
        self._on_version(change.version)
