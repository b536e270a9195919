"""What a measurement was taken on: hardware, versions, load, date, commit. Nothing here names a host or a user."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "ray")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_facts(*, now: datetime | None = None) -> Mapping[str, Any]:
    """See the module docstring. ``loadavg_1m`` says whether the machine was busy with something else before."""
    return {
        "cpu": _cpu_model(Path("/proc/cpuinfo")),
        "cores": cores(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "loadavg_1m": round(os.getloadavg()[0], 2),
        "date": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
    }


def commit(root: Path) -> str:
    """The checkout's commit, with ``+changes`` if files differ from it; ``unknown`` outside a checkout.

    What the benchmarks themselves recorded does not count as a change.
    """
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changes = _git(root, "status", "--porcelain", "--", ".", ":!loadtest/results", ":!README.md")
    return head + ("+changes" if changes else "")


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
