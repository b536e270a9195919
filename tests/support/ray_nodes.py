"""A Ray of several nodes on this machine, for tests of what happens between hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait_bench.placement.live.cluster import LocalNodes, local_nodes
from support.cluster import stop_shared


@pytest.fixture
def ray_nodes() -> Iterator[LocalNodes]:
    """A head without resources. Tests add nodes (`add`), attach (`plait_bench.placement.live.cluster.attached`), kill
    nodes (`lose`). Slow to start: ten seconds, and two or three for each node."""
    stop_shared()  # a process is attached to one Ray at a time
    with local_nodes() as nodes:
        yield nodes
