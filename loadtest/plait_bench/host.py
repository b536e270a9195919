"""What a measurement was taken on: hardware, versions, load, date, commit. Nothing here names a host or a user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plait_loadtest.host import facts, git_says

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "ray")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_facts(*, now: datetime | None = None) -> Mapping[str, Any]:
    """See the module docstring. ``loadavg_1m`` says whether the machine was busy with something else before."""
    return {
        **facts(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **{name: _version(name) for name in LIBRARIES},
        "date": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
    }


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
