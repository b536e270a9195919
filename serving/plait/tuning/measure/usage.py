"""What the replicas of an application use: processor time, memory, GPU memory.

Serve names its processes `ray::ServeReplica:APP:DEPLOYMENT`. Memory is the proportional set size: what processes share
(tables mapped by several workers) counts once.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import psutil

from plait.server import processes

_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUsage:
    """Use over a period of time: processor seconds, and the maximum memory seen."""

    cpu_s: float
    memory_bytes: int
    gpu_memory_bytes: int = 0


def replica_pids(app: str, *, run_id: str | None = None) -> dict[int, str]:
    """Return the replicas of an application on this machine: pid to deployment. `run_id`: only those of this run."""
    prefix, found = f"ray::ServeReplica:{app}:", dict[int, str]()
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ()).strip()
        if title.startswith(prefix):
            found[process.pid] = title.removeprefix(prefix).split(".")[0].split()[0]
    if run_id is None:
        return found
    members = {process.pid for process in processes.members(run_id)}
    return {pid: name for pid, name in found.items() if pid in members}


class UsageSampler:
    """Samples these processes every half second for the duration of the block."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._before_s = {pid: _cpu_s(pid) for pid in self._pids}
        self._cpu_s = dict(self._before_s)
        self._memory_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tune-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def used(self) -> ResourceUsage:
        """Return the use since the block began; of a process that has ended, until it was seen last."""
        self._look()
        return ResourceUsage(
            cpu_s=sum(self._cpu_s.values()) - sum(self._before_s.values()),
            memory_bytes=self._memory_bytes,
            gpu_memory_bytes=gpu_memory_bytes(self._pids),
        )

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._look()

    def _look(self) -> None:
        for pid in self._pids:
            self._cpu_s[pid] = max(self._cpu_s[pid], _cpu_s(pid))
        self._memory_bytes = max(self._memory_bytes, sum(map(pss_bytes, self._pids)))


def gpu_memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory that the processes hold on NVIDIA GPUs; 0 without one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    query = ["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run([command, *query], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    ours = frozenset(pids)
    rows = [line.split(",") for line in said.splitlines() if line.count(",") == 1]
    return sum(
        int(mib) << 20 for pid, mib in rows if pid.strip().isdigit() and int(pid) in ours and mib.strip().isdigit()
    )


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process; 0 if there is none."""
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0
