"""How long a replica takes to start. The first module of ours that a replica imports, with its class."""

from __future__ import annotations

import time

_NOTICED_S = 2.0
"""Until Serve has noticed the loss of a replica and Ray has begun to start a process."""
_imported_s = time.monotonic()


def seconds_to_start() -> float:
    """Return how long a replica like this is likely to be away when it is lost; call it when it is ready."""
    return estimate_s(wall_s=time.monotonic() - _imported_s, cpu_s=time.process_time())


def estimate_s(*, wall_s: float, cpu_s: float) -> float:
    """Return the expected time of a start from those of the first one.

    With a server, everything starts at once and waits for the cores; a replica that is started again has them nearly
    for itself, and then its processor time counts. What it spent waiting for a disk is at least not forgotten.
    """
    return _NOTICED_S + min(max(cpu_s, wall_s / 4), max(wall_s, cpu_s / 2))
