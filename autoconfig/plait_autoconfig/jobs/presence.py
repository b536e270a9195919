"""Whether a worker of a job is alive: its claims are its own for so long."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

LEASE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """The process of a worker, and when it said last that it works. `place`: the host, its boot and the namespace in
    which `pid` counts. `started`: in clock ticks since that boot, for a number that is used again.

    A worker that died is known at once where its process can be looked up; one that hangs, or works elsewhere, when it
    said nothing for `LEASE_S`. Times are in seconds since 1970.
    """

    place: str
    pid: int
    started: int
    seen_s: float

    @classmethod
    def own(cls, *, now_s: float) -> Self:
        """Return the presence of this process."""
        return cls(place=_place(), pid=os.getpid(), started=_started(os.getpid()) or 0, seen_s=now_s)

    def holds(self, *, now_s: float) -> bool:
        """Return whether the worker is alive and working."""
        gone = self.place == _place() and _started(self.pid) != self.started
        return not gone and now_s - self.seen_s < LEASE_S


@cache
def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> int | None:
    """Return when a process started; None if there is none, or only what its parent has not asked for yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
