"""Processes and all their descendants: found in /proc, stopped and continued together."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["PROC", "go_on", "stand_still", "status_of", "with_descendants"]

PROC = Path("/proc")


def stand_still(pids: Sequence[int]) -> None:
    """Stop the processes and their descendants until `go_on`: they take no time from anybody meanwhile."""
    stopped: set[int] = set()
    while new := with_descendants(pids) - stopped:  # one that was not stopped yet may have started another
        _send(new, signal.SIGSTOP)
        stopped |= new


def go_on(pids: Sequence[int]) -> None:
    """Let the processes and their descendants run again."""
    _send(with_descendants(pids), signal.SIGCONT)


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def with_descendants(pids: Sequence[int], proc: Path = PROC) -> set[int]:
    """Return the processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit():
            parent = status_of(int(folder.name), proc).get("PPid")
            if parent is not None:
                children.setdefault(parent, []).append(int(folder.name))
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def status_of(pid: int, proc: Path = PROC) -> dict[str, int]:
    """Return the numbers of a process's status file, in bytes where it says kB; none if the process has ended."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if name in {"PPid", "VmRSS", "VmHWM"} and words:
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found
