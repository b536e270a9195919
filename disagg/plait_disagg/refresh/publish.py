"""Publishing: an update becomes the version that all workers serve, in two phases, so that no request sees half of it.

1. The update is checked against the package and copied into its journal (not listed yet).
2. It is staged at all HNs, then at all CNs: each checks it and prepares it beside what it serves. If one cannot,
   nothing has changed anywhere.
3. It is listed in the journal. This is the commit point: a worker that starts now includes it.
4. CNs switch, each between two batches; a batch names the dense version that it needs, and HNs have both. Then HNs do.

A publisher that dies before 3 leaves the old version, after 3 the new one for everyone who reads the journal,
which workers do (`Refresher.catch_up`). Publishing again completes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from plait_disagg.package.read import Package
from plait_disagg.refresh.check import checked
from plait_disagg.refresh.errors import BadUpdate, NotPublished
from plait_disagg.refresh.journal import Journal
from plait_disagg.refresh.update import read_update, read_update_manifest


class RoleWorkers(Protocol):
    """All workers of one role. Outcomes are by worker: None, or the error of that worker."""

    def stage(self, folder: Path) -> Mapping[str, Exception | None]:
        """Call `Refresher.stage` at each worker."""

    def switch(self, version: str) -> Mapping[str, Exception | None]:
        """Call `Refresher.switch` at each worker."""


def publish(package: Package, update: Path, fleets: Sequence[RoleWorkers]) -> str:
    """Publish the update at `update` to the `fleets` that serve `package`, HNs before CNs, and return its version.

    Blocks. Publishing the same update again is not an error. Raises `BadUpdate` (nothing changed), `NotPublished`
    (nothing changed or, where the message says so, some workers have not switched yet; they will when they next read
    the journal), `PackageError`.
    """
    journal = Journal(package.folder)
    try:
        with journal.locked():
            version = read_update_manifest(update).version
            if not _is_listed(journal, update):
                version_now = (package.manifest.version, *journal.versions())[-1]
                checked(package, read_update(update), version_now)
                _stage_and_list(journal, update, version, fleets)
            _switch(version, fleets)
    except OSError as error:
        raise NotPublished(f"{error.filename or package.folder}: {error.strerror}") from error
    return version


def _is_listed(journal: Journal, update: Path) -> bool:
    """Return whether it was the last one published. Raises `BadUpdate` if its version is another update's."""
    manifest, versions = read_update_manifest(update), journal.versions()
    if manifest.version not in versions:
        return False
    if versions[-1] != manifest.version or read_update_manifest(journal.path(manifest.version)) != manifest:
        raise BadUpdate("update.json.version", f"there was a version {manifest.version} already")
    return True


def _stage_and_list(journal: Journal, update: Path, version: str, fleets: Sequence[RoleWorkers]) -> None:
    stored = journal.store(update, version)
    try:
        for fleet in fleets:
            _all_well(fleet.stage(stored), "nothing has changed; try again")
        journal.record(version)
    except BaseException:
        if version not in journal.versions():
            journal.discard(version)
        raise


def _switch(version: str, fleets: Sequence[RoleWorkers]) -> None:
    failed: dict[str, Exception | None] = {}
    for fleet in reversed(fleets):  # HNs last: they let go of the oldest version
        failed |= fleet.switch(version)
    _all_well(failed, f"version {version} is published, and this worker will follow")


def _all_well(outcomes: Mapping[str, Exception | None], otherwise: str) -> None:
    """Check that no worker failed: raise a worker's own `BadUpdate`, otherwise `NotPublished`."""
    for worker, error in outcomes.items():
        if isinstance(error, BadUpdate):
            raise error
        if error is not None:
            raise NotPublished(f"{worker}: {error}; {otherwise}") from error
