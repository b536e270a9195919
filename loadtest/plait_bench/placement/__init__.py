"""Placement policies on public lists of GPU tasks: how much of a cluster's GPUs do tasks get?

Workloads: the lists of the FGD publication (read from the data folder) and tasks that depart (`departures`). A round is
a seed, 42 to 51 as published; all policies see the same tasks in the same order. `ray` and `small-ray` are played on a
Ray of several nodes with Serve (`on_ray.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait_bench.benchmark import Workload, selected
from plait_bench.placement.filling import PUBLISHED, Departures, Filling
from plait_bench.placement.on_ray import LARGE, SMALL, OnRay

SEEDS, QUICK_SEEDS = 10, 2


def benchmark(*, only: Sequence[str] = (), data: Path | None = None) -> tuple[Workload, ...]:
    """Make the benchmark; `data`: the folder that holds `fgd`. Raises `BenchError`."""
    published = [Filling(name, data) for name in PUBLISHED]
    on_ray = [OnRay("ray", LARGE), OnRay("small-ray", SMALL)]
    return selected([*published, Departures("departures", data), *on_ray], only)
