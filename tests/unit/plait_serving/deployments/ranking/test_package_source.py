"""What a process opens of a packaged model."""

from __future__ import annotations

from plait_disagg.package.manifest import TABLES
from plait_disagg.tables import storage
from plait_serving.deployments.ranking.package_source import PackageSource
from plait_serving.ranking.config import STARTER_RANKING_FOLDER


def test_who_publishes_updates_reads_no_tables_ahead(monkeypatch):
    """The ingress checks an update against the tables' header, and does not fill its host's memory with their rows, as
    a worker that looks up does."""
    read = []
    monkeypatch.setattr(storage, "read_ahead", lambda path, _: read.append(path))
    package = PackageSource(STARTER_RANKING_FOLDER).package()
    assert package.tables.is_writable
    assert not read
    package.sparse()
    assert read == [STARTER_RANKING_FOLDER / TABLES]
