"""Processes by identity: a pid alone may have been reused; a pid together with its start time cannot be.

All look-ups read Linux's `/proc`; only processes of this user are ever found or ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RUN_ID_VARIABLE = "PLAIT_RUN_ID"
"""Every process of a run inherits this variable, including those that lost their parent."""

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_KILL_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """A unique process identity: `start_ticks` is its start in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class _Stat:
    identity: ProcessId
    name: str
    parent: int
    zombie: bool


def boot_id() -> str:
    """Return the id of this boot of the machine; start times from another boot are meaningless."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a running process; None if there is none (a zombie is not running)."""
    stat = _stat(pid)
    return None if stat is None or stat.zombie else stat.identity


def me() -> ProcessId:
    """Return the identity of this process."""
    found = identify(os.getpid())
    assert found is not None
    return found


def has_ended(process: ProcessId, boot: str) -> bool:
    """Return whether a process has ended that ran in that boot."""
    return boot != boot_id() or not is_running(process)


def is_running(process: ProcessId) -> bool:
    """Return whether exactly this process is still running."""
    return identify(process.pid) == process


def has_child(name: str) -> bool:
    """Return whether a child of this process that the kernel calls so is running."""
    return any(stat.name == name and stat.parent == os.getpid() for stat in _own_stats())


def members(run_id: str, root: int | None = None) -> frozenset[ProcessId]:
    """Return the processes of a run: those that carry its id in their environment, and the descendants of `root`.

    Excludes `root` and the caller.
    """
    stats = _own_stats()
    inside = {root} if root is not None else set()
    grown = -1
    while grown != len(inside):
        grown = len(inside)
        inside |= {stat.identity.pid for stat in stats if stat.parent in inside}
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = {s.identity for s in stats if s.identity.pid in inside or _carries(s.identity.pid, marker)}
    return frozenset(process for process in found if process.pid not in (root, os.getpid()))


def end(processes: Iterable[ProcessId], *, grace_s: float = 2.0) -> tuple[ProcessId, ...]:
    """Send SIGTERM, then SIGKILL after `grace_s`; SIGKILL at once to those that ignore SIGTERM, as Python's shared
    memory trackers do. Return those that survived even that (normally none): on a busy machine a process of gigabytes
    takes seconds to go."""
    left = [process for process in processes if is_running(process)]
    for process in left:
        _send(process, signal.SIGKILL if _ignores(process, signal.SIGTERM) else signal.SIGTERM)
    left = wait_until_gone(left, timeout_s=grace_s)
    for process in left:
        _send(process, signal.SIGKILL)
    return tuple(wait_until_gone(left, timeout_s=_KILL_WAIT_S))


def wait_until_gone(processes: Iterable[ProcessId], *, timeout_s: float) -> list[ProcessId]:
    """Wait until all have ended, at most `timeout_s`; return those that have not."""
    until_s = time.monotonic() + timeout_s
    left = [process for process in processes if is_running(process)]
    while left and time.monotonic() < until_s:
        time.sleep(0.05)
        left = [process for process in left if is_running(process)]
    return left


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the thread that started it dies; for `preexec_fn`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _send(process: ProcessId, signum: signal.Signals) -> None:
    """Send a signal through a pidfd, which pins the process, so it cannot be replaced between the check and the
    signal."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if is_running(process):
            signal.pidfd_send_signal(handle, signum)
    except OSError:
        return
    finally:
        os.close(handle)


def _ignores(process: ProcessId, signum: signal.Signals) -> bool:
    """Return whether the process ignores the signal (`SigIgn` of /proc/PID/status, bit 0 is signal 1)."""
    try:
        lines = (_PROC / str(process.pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")), 0)
    return bool(mask >> (signum - 1) & 1)


def _own_stats() -> list[_Stat]:
    mine = os.getuid()
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == mine and (stat := _stat(int(entry.name))) and not stat.zombie:
                    found.append(stat)
            except OSError:
                continue
    return found


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # the name may hold spaces and brackets
    fields = tail.split()
    state, parent, start_ticks = fields[0], int(fields[1]), int(fields[19])
    return _Stat(ProcessId(pid, start_ticks), head.partition("(")[2], parent, state in "ZX")


def _carries(pid: int, marker: bytes) -> bool:
    try:
        return marker in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
