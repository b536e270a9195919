"""The resident memory of processes and all their descendants, read from /proc."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait_bench.fleet.values import MemoryUse

__all__ = ["memory_of"]

_PROC = Path("/proc")


def memory_of(pids: Sequence[int], proc: Path = _PROC) -> MemoryUse:
    """Add up the resident memory of the processes and their descendants; pages that they share count for each.

    The peak is the sum of each process's own, at whatever time that was: no less than what they had at any moment.
    """
    now, peak = 0, 0
    for pid in _with_descendants(pids, proc):
        status = _status(proc / str(pid) / "status")
        now += status.get("VmRSS", 0)
        peak += status.get("VmHWM", 0)
    return MemoryUse(now_bytes=now, peak_bytes=peak)


def _with_descendants(pids: Sequence[int], proc: Path) -> set[int]:
    children: dict[int, list[int]] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit():
            parent = _status(folder / "status").get("PPid")
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


def _status(path: Path) -> dict[str, int]:
    """Return the numbers of a status file, in bytes where it says kB; none if the process has ended."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if name in {"PPid", "VmRSS", "VmHWM"} and words:
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found
