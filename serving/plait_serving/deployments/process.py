"""What a replica's process settles before it loads anything: its log, CPU threads, turns at the GIL; and how long it
takes to start. The first module of ours that a replica imports, with its class."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from plait_deploy.on_ray.nodes import whereabouts
from plait_disagg.request_log import add_requests
from plait_serving.imports import importing

if TYPE_CHECKING:
    from plait_serving.ranking.config import OmpWait
    from plait_serving.replica_metrics import ReplicaMetrics

_log = logging.getLogger(__name__)

_NOTICED_S = 2.0
"""Until Serve has noticed the loss of a replica and Ray has begun to start a process."""
_imported_s = time.monotonic()

LOG_PATH_VARIABLE = "PLAIT_LOG_PATH"
"""Set by `plait serve` for everything it starts: all processes append to one file, whole lines at a time."""

OUR_LOGGERS = ("plait", "plait_serving", "plait_disagg", "plait_fabric", "plait_kernels")

_GIL_TURN_S = 5e-4


def configure_logging(replica: str, environ: Mapping[str, str]) -> None:
    """Send our loggers' lines, from INFO up, with the ids of the requests that they are about, to the file of
    `LOG_PATH_VARIABLE`, else to stderr (which Ray keeps)."""
    path = environ.get(LOG_PATH_VARIABLE)
    try:
        handler: logging.Handler = logging.FileHandler(path) if path else logging.StreamHandler()
    except OSError:
        handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {replica} %(name)s: %(message)s%(requests)s"))
    handler.addFilter(add_requests)
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def seconds_to_start() -> float:
    """Return how long a replica like this is likely to be away when it is lost; call it when it is ready."""
    return estimate_s(wall_s=time.monotonic() - _imported_s, cpu_s=time.process_time())


def estimate_s(*, wall_s: float, cpu_s: float) -> float:
    """Return the expected time of a start from those of the first one.

    With a server, everything starts at once and waits for the cores; a replica that is started again has them nearly
    for itself, and then its processor time counts. What it spent waiting for a disk is at least not forgotten.
    """
    return _NOTICED_S + min(max(cpu_s, wall_s / 4), max(wall_s, cpu_s / 2))


def shorten_gil_interval() -> None:
    """Make this process's threads wait for the GIL for at most half a millisecond, not 5 ms (Python's default).

    For processes in which a compute thread shares the GIL with an event loop, or with threads that read LoRA files: a
    lookup of 50 us, or an operation of torch, releases it, and would have to wait for those before the next one. No
    benchmark shows a gain yet.
    """
    sys.setswitchinterval(_GIL_TURN_S)


class LazyReplica:
    """The class of every deployment that holds a model. It stands for another one: imports that in the replica, makes
    one, and has what that has, since Serve looks methods up on the replica's object and not on its class. Where the
    application is built (the command, Serve's builder task) nobody needs torch, which costs some seconds and half a
    gigabyte."""

    def __init__(self, target: str, *, omp_wait: OmpWait = "default", **arguments: Any) -> None:
        """Import and construct the target, a `module:Class`; raises whatever its constructor raises. What OpenMP reads
        once, when torch is imported, is settled before: `omp_wait`, of which "default" leaves its policy unchanged, and
        that Ray sets its threads to the actor's logical CPUs.

        The engine sets them from the knobs, and an OpenMP that starts with one thread and is then switched to two burns
        processor time waiting: measured on 2 shared cores, a step of the starter model took 0.3 to 0.9 s of processor
        time with Ray's variable and 0.05 to 0.09 s without.
        """
        if "torch" in sys.modules:
            _log.warning("torch was imported before the replica could choose its threads")
        os.environ.pop("OMP_NUM_THREADS", None)
        if omp_wait != "default":
            os.environ["OMP_WAIT_POLICY"] = omp_wait.upper()
        with importing():
            made = resolve_name(target)
        self._inner = made(**arguments)

    def __getattr__(self, name: str) -> Any:
        """Return what the target has of that name; nothing until it is made."""
        if "_inner" not in vars(self):
            raise AttributeError(name)
        return getattr(self._inner, name)

    async def metric_families(self) -> ReplicaMetrics:
        """Return what the target counts, and where this replica is."""
        counted: ReplicaMetrics = await self._inner.metric_families()
        return replace(counted, at=whereabouts())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the target reports to Serve's controller, and where this replica is."""
        return {**await self._inner.record_autoscaling_stats(), **whereabouts()}
