"""What a process opens of a packaged model."""

from __future__ import annotations

from plait_serving.deployments.ranking.package_source import PackageSource
from plait_serving.ranking.config import STARTER_RANKING_FOLDER


def test_who_publishes_updates_reads_no_tables_ahead():
    """The ingress checks an update against the tables' header, and does not fill its host's memory with their rows."""
    assert not PackageSource(STARTER_RANKING_FOLDER).package().ahead
