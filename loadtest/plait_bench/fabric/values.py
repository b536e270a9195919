"""What a round of the fabric's benchmark takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["PEER_START_S", "WAIT_S", "RoundValue", "pinned_apart"]

PEER_START_S = 60.0
"""How long a peer's process may take to come up on a busy machine."""
WAIT_S = 60.0
"""How long an answer may take before the run is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundValue:
    """One value of one round. ``layout``: a remark that goes with it."""

    workload: str
    system: str
    metric: str
    value: float
    layout: str = ""
    kind: str = "measured"


@contextmanager
def pinned_apart(pid: int) -> Iterator[str]:
    """This process on one core and that one on another, if there are two; says so. A scheduler that puts both on one
    makes them take turns, which says nothing about the fabric."""
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
