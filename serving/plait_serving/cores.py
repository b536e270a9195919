"""Cores of a host: what a replica reserves, how many threads it may use, and whether its host has that many.

A replica's core budget is its `num_cpus`, possibly a fraction: Ray places by it and the tuner pays for it. Its
`threads` are a cap at or above the budget. Budgets are kept by nobody, so where the caps of a host's replicas exceed
its cores, they share them: times measured there are those of that mixture, and reports call the host `shared`.

Each replica declares its cap in a file of a folder that all of the host's replicas know, beside their sockets; a file
whose process has ended does not count.
"""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field

from plait_kernels.cores import usable_cores

_log = logging.getLogger(__name__)

CoreBudget = Annotated[
    float | None,
    Field(gt=0, le=1024, description="cores of a replica, for Ray's placement and the tuner's price; unset: small"),
]
"""The type of `num_cpus` in a section of plait.yaml."""

KnobsT = TypeVar("KnobsT", bound=BaseModel)

_PREFIX = "threads-"
_SOCKET = re.compile(r"^[a-z]+-(\d+)-[0-9a-f]+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCores:
    """The cores of a host, and the thread caps of its replicas together."""

    cores: int
    planned_threads: int

    @property
    def is_shared(self) -> bool:
        """Whether the replicas cannot all use their threads at once."""
        return self.planned_threads > self.cores


def capped(knobs: KnobsT, num_cpus: float | None) -> KnobsT:
    """Return knobs with as many `threads` as a replica may use: what they say, but at least its budget. 0 means the
    budget rounded up, or, without one, 0: all cores."""
    threads = getattr(knobs, "threads", None)
    if threads is None or num_cpus is None:
        return knobs
    return knobs.model_copy(update={"threads": max(threads, math.ceil(num_cpus))})


def cpu_threads(threads: int) -> int:
    """Return `threads`, or the number of cores for 0: otherwise Ray's OMP_NUM_THREADS would limit torch to the
    replica's share of logical CPUs."""
    return threads or usable_cores()


def socket_folder() -> Path:
    """Return the folder for the sockets of this user's replicas, and for what they declare."""
    return Path(tempfile.gettempdir()) / f"plait-{os.geteuid()}"


def remove_stale_sockets(folder: Path) -> None:
    """Remove the sockets of replicas that were killed; a process that has ended may wait for its parent to take
    note."""
    for path in folder.glob("*-*-*"):
        if match := _SOCKET.match(path.name):
            with suppress(OSError):
                if _state(int(match[1]))[0] not in ("Z", "X"):
                    continue
            path.unlink(missing_ok=True)


def declare_thread_cap(threads: int) -> None:
    """Declare how many threads this replica may use (0: all cores), for the count of its host; a failure is logged."""
    try:
        declare_threads(socket_folder(), cpu_threads(threads))
    except OSError as error:
        _log.warning("the host's threads are counted without this replica's: %s", error)


def declare_threads(folder: Path, threads: int) -> None:
    """Declare this process's cap; a later call replaces it. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    pid = os.getpid()
    path = folder / f"{_PREFIX}{pid}-{_started(pid):x}"
    unfinished = path.with_suffix(".new")
    unfinished.write_text(str(threads), encoding="ascii")
    unfinished.replace(path)


def threads_of_host(folder: Path, *, cores: int) -> HostCores:
    """Return what the living processes have declared on a host with so many cores; a file that says nothing counts as
    none."""
    planned = 0
    for path in folder.glob(f"{_PREFIX}*-*"):
        pid, _, started = path.name.removeprefix(_PREFIX).partition("-")
        try:
            if _started(int(pid)) == int(started, 16):
                planned += int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return HostCores(cores=cores, planned_threads=planned)


def _started(pid: int) -> int:
    """Return when a process began, in clock ticks since the boot: a number is used again, but not with that. Raises
    `OSError` if there is none."""
    return int(_state(pid)[19])


def _state(pid: int) -> list[str]:
    """Return what the kernel says of a process, its state first. Raises `OSError` if there is none."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
