"""Shared parts of the fabric benchmark's workloads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from plait_bench.benchmark import Reading

__all__ = ["PEER_START_S", "WAIT_S", "CallSubject", "on_separate_cores"]

PEER_START_S = 60.0
"""How long a peer's process may take to start on a busy machine."""
WAIT_S = 60.0
"""How long an answer may take before the run is abandoned."""


@dataclass(frozen=True)
class CallSubject:
    """A `Subject` whose rounds are single calls, which warm up by themselves."""

    take: Callable[[], Sequence[Reading]]

    def warm_up(self) -> None:
        """Do nothing: every call has a peer of its own."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Make the call and return its readings."""
        return self.take()


@contextmanager
def on_separate_cores(pid: int) -> Iterator[str]:
    """Pin this process to one core and process `pid` to another, if there are two; yield a remark on the placement.
    A scheduler that puts both on one core makes them take turns, which would not measure the fabric."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield "on one core"
        return
    os.sched_setaffinity(pid, cores[1:2])
    os.sched_setaffinity(0, cores[:1])
    try:
        yield "a core each"
    finally:
        os.sched_setaffinity(0, cores)
