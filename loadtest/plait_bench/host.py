"""The conditions of a measurement: hardware, versions, load, date, commit. Nothing here names a host or a user."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plait_bench.errors import BenchError
from plait_kernels.cores import instruction_set
from plait_loadtest.host import facts, git_says

_ECHO = "import os\nwhile os.read(0, 1): os.write(1, b'x')"
_ROUND_TRIPS = 301
_GIT_S = 30

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "ray", "openvino", "triton")


SLOW_WAKE_US = 60.0
"""The wake-up time above which a host counts as busy: several times what an idle machine needs to wake another
process and be woken by it."""

BUSY_LOAD = 0.5
"""The one-minute load average before a benchmark begins above which the host counts as busy: half a core of other
work is already too much for a fair comparison of two systems that run in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConditions:
    """The state of the host at one moment: the load average of the last minute, and how long a wake-up takes."""

    load: float
    wake_us: float


def conditions() -> HostConditions:
    """Measure the host's conditions. From the second round on, `load` includes the benchmark's own work."""
    return HostConditions(load=round(os.getloadavg()[0], 2), wake_us=round(wake_us(), 1))


def is_busy(seen: HostConditions) -> bool:
    """Return whether the host was busy with other work."""
    return seen.load > BUSY_LOAD or seen.wake_us > SLOW_WAKE_US


def host_facts() -> Mapping[str, Any]:
    """Describe this machine. `loadavg_1m` shows whether the machine was busy with something else before; `wake_us`, how
    long it takes to wake another process and be woken by it, which on a virtual machine can be long while the load
    average shows nothing."""
    return {
        **facts(),
        "instruction_set": instruction_set(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **{name: _version(name) for name in LIBRARIES},
        **gpu_facts(),
        "wake_us": round(wake_us(), 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def gpu_facts() -> Mapping[str, str]:
    """Name the GPU and its driver; nothing where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    name, _, driver = said.splitlines()[0].partition(", ")
    return {"gpu": name, "driver": driver}


def wake_us() -> float:
    """Measure the median round trip of a byte to another process and back, in microseconds."""
    with subprocess.Popen([sys.executable, "-c", _ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as echo:
        assert echo.stdin is not None
        assert echo.stdout is not None
        there, back = echo.stdin.fileno(), echo.stdout.fileno()
        taken_us = []
        for _ in range(_ROUND_TRIPS):
            began_s = time.perf_counter()
            os.write(there, b"x")
            os.read(back, 1)
            taken_us.append((time.perf_counter() - began_s) * 1e6)
        echo.stdin.close()
    return statistics.median(taken_us[1:])  # the first one waits for Python to start


ROOT = Path(__file__).resolve().parents[2]

UNKNOWN = "unknown"

PACKAGE_FOLDERS = ("autoconfig", "deploy", "disagg", "kernels", "loadtest", "serving")
"""The folders from which a benchmark could import a file that git does not track."""

_RESULTS = ("loadtest/results/", "loadtest/RESULTS.md")


def commit(root: Path) -> str:
    """Return the checkout's commit, with `+changes` if it is dirty (`changes`); `UNKNOWN` outside a checkout."""
    head = git_says(root, "rev-parse", "--short=12", "HEAD")
    if not head:
        return UNKNOWN
    return head + ("+changes" if changes(root) else "")


def changes(root: Path) -> list[str]:
    """Return the paths that make a checkout dirty: tracked files that differ, and untracked ones in package folders.

    What the benchmarks themselves record does not count.
    """
    status = git_says(root, "-c", "core.quotePath=off", "status", "--porcelain", "--untracked-files=all")
    found = []
    for line in status.splitlines():
        # The first line has lost its leading blank with the output's.
        kind, _, path = line.strip().partition(" ")
        path = path.strip().rpartition(" -> ")[2]
        if path.startswith(_RESULTS) or (kind == "??" and path.split("/")[0] not in PACKAGE_FOLDERS):
            continue
        found.append(path)
    return found


def history(root: Path) -> frozenset[str]:
    """Return HEAD and its ancestors, as rows name commits. Raises `BenchError` outside a checkout."""
    if not (said := git_says(root, "rev-list", "--abbrev-commit", "--abbrev=12", "HEAD")):
        raise BenchError("git knows no commit here")
    return frozenset(said.split())


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
