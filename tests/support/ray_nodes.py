"""A Ray of several nodes on this machine, for tests of what happens between hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from plait.server.environment import patient_start
from plait_bench.placement.cluster import LocalNodes, local_nodes
from support.cluster import stop_shared

_START_S = 240.0


@contextmanager
def local() -> Iterator[LocalNodes]:
    """A head without resources. Tests add nodes (`add`), attach (`plait_bench.placement.cluster.attached`), and
    kill nodes (`lose`). It takes ten seconds to start, and each node two or three."""
    stop_shared()  # a process is attached to one Ray at a time
    with patient_start(_START_S), local_nodes() as nodes:
        yield nodes


@pytest.fixture
def ray_nodes() -> Iterator[LocalNodes]:
    """The same for one test."""
    with local() as nodes:
        yield nodes


def wait_for(done: Callable[[], bool], what: Callable[[], str], *, limit_s: float) -> None:
    """Return when `done`. Raises `TimeoutError` that says `what` after `limit_s`."""
    until_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until_s:
            raise TimeoutError(what())
        time.sleep(0.3)
