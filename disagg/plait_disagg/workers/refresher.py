"""The worker's side of a refresh: stages updates, switches to them, and follows the package's journal on its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from plait_disagg.refresh.errors import NotPublished, RefreshError
from plait_disagg.refresh.journal import Journal
from plait_disagg.refresh.live_package import LivePackage
from plait_disagg.refresh.prepared_update import PreparedUpdate, Refreshable
from plait_disagg.refresh.update import read_update_manifest
from plait_kernels.threads import lower_priority, run_on_own_thread, set_threads

_log = logging.getLogger(__name__)


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
