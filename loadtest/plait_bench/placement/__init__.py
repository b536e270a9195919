"""Placement policies on public lists of GPU tasks: how much of a cluster's GPUs do tasks get?

Workloads: the lists of the FGD publication (read from the data folder) and tasks that depart (`departures`). A round is
a seed, 42 to 51 as published; all policies see the same tasks in the same order. `ray` and `small-ray` are played on a
Ray of several nodes with Serve (`on_ray.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait_bench.benchmark import Benchmark, Workload, chosen
from plait_bench.placement import filling
from plait_bench.placement.on_ray import LARGE, SMALL, OnRay

NAME = "placement"
SEEDS, QUICK_SEEDS = 10, 2


def benchmark(*, only: Sequence[str] = (), data: Path | None = None) -> Benchmark:
    """Make the benchmark; `data`: the folder that holds `fgd`. Raises `BenchError`."""
    workloads: dict[str, Workload] = {name: make(name, data) for name, make in filling.WORKLOADS.items()}
    workloads |= {"ray": OnRay("ray", LARGE), "small-ray": OnRay("small-ray", SMALL)}
    return Benchmark(name=NAME, workloads=tuple(workloads[name] for name in chosen(only, tuple(workloads), "workload")))
