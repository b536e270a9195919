"""The resident memory of processes and all their descendants, read from /proc."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait_bench.fleet.process_tree import PROC, status_of, with_descendants
from plait_bench.fleet.values import MemoryUse

__all__ = ["memory_of"]


def memory_of(pids: Sequence[int], proc: Path = PROC) -> MemoryUse:
    """Add up the resident memory of the processes and their descendants; pages that they share count for each.

    The peak is the sum of each process's own, at whatever time that was: no less than what they had at any moment.
    """
    now, peak = 0, 0
    for pid in with_descendants(pids, proc):
        status = status_of(pid, proc)
        now += status.get("VmRSS", 0)
        peak += status.get("VmHWM", 0)
    return MemoryUse(now_bytes=now, peak_bytes=peak)
