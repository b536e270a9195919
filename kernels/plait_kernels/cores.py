"""The processor: how many cores a process may use (those that it is bound to, and what its container may spend on
them), and what it computes natively."""

from __future__ import annotations

import functools
import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_SETS = {
    "amx_bf16": {"amx_bf16"},
    "avx512_bf16": {"avx512_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma"},
    "neon_bf16": {"asimd", "bf16"},
    "neon": {"asimd"},
}
"""The sets that programs are compiled to, widest first, with the flags that the kernel lists for them; the last two are
Arm's."""
_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "neon_bf16"})
"""Those with instructions that multiply in bfloat16."""
_LIMITS = {
    "avx512": "avx512",
    "avx512_core": "avx512",
    "avx512_core_vnni": "avx512",
    "avx512_core_bf16": "avx512_bf16",
    "avx512_core_fp16": "avx512_bf16",
    "avx10_1_512": "avx512_bf16",
    "avx2": "avx2",
    "avx2_vnni": "avx2",
    "avx2_vnni_2": "avx2",
    "avx": "neon_bf16",
    "sse41": "neon_bf16",
}
"""The first set that a value of ONEDNN_MAX_CPU_ISA, or of its older name, leaves (oneDNN, "CPU dispatcher control"): of
the last two none of x86's. Any other value leaves all."""
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """Return the number of cores that this process may keep busy, at least 1. `cgroups`: its control group's folder.

    A container with a processor quota sees all cores of its host; as many threads as that would use up the quota at
    once and then all stand still for the rest of each period. A quota of a fraction is rounded up, and looked up
    again after a second: it may change, and programs ask before every step.
    """
    bound = len(os.sched_getaffinity(0))
    quota = _quota_cores_in(cgroups, int(time.monotonic()))
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


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo"), environ: Mapping[str, str] = os.environ) -> str:
    """Return the widest vector instructions that torch's convolutions and products use here: a name of `_SETS`, "none",
    or the machine's type where the system does not say. ONEDNN_MAX_CPU_ISA counts; OpenVINO does not know it."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    flags = set(text.split())
    names = list(_SETS)
    asked = next((environ[name] for name in _VARIABLES if name in environ), "")
    if (limit := _LIMITS.get(asked.lower())) is not None:
        names = names[names.index(limit) :]
    return next((name for name in names if _SETS[name] <= flags), "none")


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo"), environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the CPU has instructions for bfloat16 and may use them; False where the system does not say."""
    return instruction_set(cpuinfo, environ) in _BFLOAT16
