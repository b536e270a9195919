"""What a replica learns and settles before it loads anything: CPU threads, turns at the GIL."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait_serving.ranking.config import OmpWait

_log = logging.getLogger(__name__)

_GIL_TURN_S = 5e-4


def unset_ray_threads(environ: MutableMapping[str, str]) -> None:
    """Remove `OMP_NUM_THREADS` from the replica's environment; call this before torch is imported.

    Ray sets it to the actor's logical CPUs. The engine sets its threads from the knobs, and an OpenMP that starts
    with one thread and is then switched to two burns processor time waiting: measured on 2 shared cores, a step of
    the starter model took 0.3 to 0.9 s of processor time with the variable and 0.05 to 0.09 s without.
    """
    if "torch" in sys.modules:
        _log.warning("torch was imported before the replica could choose its threads")
    environ.pop("OMP_NUM_THREADS", None)


def shorten_gil_interval() -> None:
    """Make this process's threads wait for the GIL for at most half a millisecond, not 5 ms (Python's default).

    For processes in which an event loop and a compute thread share the GIL: a lookup of 50 us releases it, and would
    have to wait for the loop to read half a megabyte before the next one. No benchmark shows a gain yet.
    """
    sys.setswitchinterval(_GIL_TURN_S)


def choose_omp_wait(environ: MutableMapping[str, str], wait: OmpWait) -> None:
    """Set `OMP_WAIT_POLICY`, which OpenMP reads once, when torch is imported; "default" leaves it unchanged."""
    if wait != "default":
        environ["OMP_WAIT_POLICY"] = wait.upper()
