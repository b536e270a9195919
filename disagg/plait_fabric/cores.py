"""The processor: how many cores a process may use (those that it is bound to, and what its container may spend on
them), and what it computes natively."""

from __future__ import annotations

import functools
import math
import os
import time
from pathlib import Path

__all__ = ["has_bfloat16", "quota_cores", "usable_cores"]

_CGROUPS = Path("/sys/fs/cgroup")
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Any of these flags (the last is Arm's) means that the CPU multiplies in bfloat16."""


def usable_cores() -> int:
    """Return the number of cores that this process may keep busy, at least 1.

    A container with a processor quota sees all cores of its host; as many threads as that would use up the quota at
    once and then all stand still for the rest of each period. A quota of a fraction is rounded up, and looked up
    again after a second: it may change, and programs ask before every step.
    """
    bound = len(os.sched_getaffinity(0))
    quota = _quota_cores_in(_CGROUPS, int(time.monotonic()))
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


@functools.lru_cache(maxsize=1)
def _quota_cores_in(cgroups: Path, _second: int) -> float | None:
    return quota_cores(cgroups)


def quota_cores(cgroups: Path) -> float | None:
    """Return the quota in cores of the control group at this folder, version 2 or 1; None without one."""
    try:
        if (cgroups / "cpu.max").is_file():
            quota, period = (cgroups / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (cgroups / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (cgroups / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii")
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return None
    return cores if cores > 0 else None


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU has instructions for bfloat16; False where the system does not say."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return not _BFLOAT16.isdisjoint(text.split())
