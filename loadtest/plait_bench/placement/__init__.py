"""Placement policies on public lists of GPU tasks: how much of a cluster's GPUs do tasks get?

Workloads: the lists of the FGD publication (read from the data folder), lists made from the first of them by drawing
or shifting tasks (`lists.py`), tasks that depart (`departures`), clusters up to 20,000 nodes (`nodes`), and a recorded
month of recommendation services, split or monolithic (`dlrm`). A round is a seed, 42 to 51 as published; all policies
see the same tasks in the same order. Shares of GPUs are computed, times are measured. `ray` and `small-ray` (`live/`)
are played on a Ray of several nodes with Serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from plait_bench.benchmark import Benchmark, Workload, chosen
from plait_bench.errors import SystemUnavailable
from plait_bench.placement.departing import Departures
from plait_bench.placement.filling import Filling
from plait_bench.placement.growing import Growing
from plait_bench.placement.lists import CONTENDERS, MADE, PUBLISHED, load, published_means
from plait_bench.placement.live.scenario import LARGE, SMALL
from plait_bench.placement.live.workload import OnRay
from plait_bench.placement.recommending import Recommending
from plait_deploy.placement.policies import POLICIES

NAME = "placement"
SEEDS, QUICK_SEEDS = 10, 2


def benchmark(*, only: Sequence[str] = (), data: Path | None = None) -> Benchmark:
    """Make the benchmark; `data`: the folder that holds `fgd` and `dlrm-v2025`. Raises `BenchError`."""
    workloads: dict[str, Workload] = {
        **{
            name: Filling(name, partial(load, name, data), POLICIES, published=partial(published_means, name, data))
            for name in PUBLISHED
        },
        **{name: Filling(name, partial(load, name, data), CONTENDERS) for name in MADE},
        "departures": Departures("departures", partial(load, PUBLISHED[0], data)),
        "nodes": Growing("nodes", partial(load, PUBLISHED[0], data)),
        "dlrm": Recommending("dlrm", data),
        "ray": OnRay("ray", LARGE),
        "small-ray": OnRay("small-ray", SMALL),
    }
    names = chosen(only, tuple(workloads), "workload")
    if data is not None and set(names) - {"dlrm", "ray", "small-ray"} and not (data / "fgd").is_dir():
        raise SystemUnavailable(f"placement: {data} has no folder fgd")
    return Benchmark(name=NAME, workloads=tuple(workloads[name] for name in names))
