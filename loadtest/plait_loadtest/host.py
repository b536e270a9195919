"""The host that a run was made on, for its report. Nothing here names a host or a user."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    """Return the processor, the cores that this process may use, the load of the last minute, and versions."""
    return {
        "cpu": _cpu_model(Path("/proc/cpuinfo")),
        "cores": len(os.sched_getaffinity(0)),
        "loadavg_1m": round(os.getloadavg()[0], 2),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def tool_version() -> str:
    """Return the version of the distribution that contains this package."""
    try:
        return version("plait")
    except PackageNotFoundError:
        return "unknown"


def commit() -> str | None:
    """Return the commit of this package's checkout, with `+changes` if files differ; None without a checkout."""
    here = Path(__file__).parent
    # An installed package may lie inside somebody else's checkout: only a tracked file speaks for itself.
    if not git_says(here, "ls-files", Path(__file__).name):
        return None
    head = git_says(here, "rev-parse", "--short=12", "HEAD")
    return head + ("+changes" if git_says(here, "status", "--porcelain", "--", ".") else "") if head else None


def utc(unix_s: float) -> str:
    """Return the ISO date and time in UTC, to the second."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")


def git_says(folder: Path, *arguments: str) -> str:
    """Return git's output about a folder, stripped; empty if git fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
