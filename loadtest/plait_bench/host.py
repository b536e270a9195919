"""What a measurement was taken on: hardware, versions, load, date, commit. Nothing here names a host or a user."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plait_loadtest.host import facts, git_says

_ECHO = "import os\nwhile os.read(0, 1): os.write(1, b'x')"
_ROUND_TRIPS = 301

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "ray")


SLOW_WAKE_US = 60.0
"""Several times what a machine with nothing to do needs."""


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_facts(*, now: datetime | None = None) -> Mapping[str, Any]:
    """See the module docstring. ``loadavg_1m`` says whether the machine was busy with something else before,
    ``wake_us`` how long it takes to wake another process and be woken by it, which on a virtual machine can be long
    while the load average shows nothing."""
    return {
        **facts(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **{name: _version(name) for name in LIBRARIES},
        "wake_us": round(wake_us(), 1),
        "date": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
    }


def wake_us() -> float:
    """Median round trip of a byte to another process and back, in microseconds."""
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


def commit(root: Path) -> str:
    """The checkout's commit, with ``+changes`` if files differ from it; ``unknown`` outside a checkout.

    What the benchmarks themselves recorded does not count as a change.
    """
    head = git_says(root, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changes = git_says(root, "status", "--porcelain", "--", ".", ":!loadtest/results", ":!README.md")
    return head + ("+changes" if changes else "")


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
