"""Designers on services whose every configuration is known: how many trials until a good one is found?

Workloads: `falcon` (a published table, read from the data folder), `synthetic` (made-up services with noise and failing
configurations, in several variants), and measurements of our own diffusion engine and ranker (`own-images`,
`own-recommend`). A round is a seed: all designers get the same number of trials and the same seeds; every service is
new once, tuned with the others as its library. No designer knows the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from plait_autoconfig.space import Space
from plait_autoconfig.starter_library import starter_runs
from plait_bench.autoconfig import synthetic
from plait_bench.autoconfig.cells import WORKLOADS
from plait_bench.autoconfig.searching import Searching
from plait_bench.autoconfig.services import Suite, falcon_suite, recorded_runs, recorded_suites
from plait_bench.benchmark import Benchmark, chosen
from plait_bench.errors import SystemUnavailable

NAME = "autoconfig"
SEEDS, QUICK_SEEDS = 20, 2
COLD, MISLEADING = "synthetic-cold", ("synthetic-negated", "synthetic-shuffled")
OWN = ("own-images", "own-recommend")


def benchmark(*, only: Sequence[str] = (), data: Path | None = None, tables: Sequence[Path] = ()) -> Benchmark:
    """Make the benchmark. `tables`: files of runs that replace the starter library. Raises `BenchError`."""
    own = tables or not only or set(only) & set(OWN)
    runs = recorded_runs(tables) if tables else list(starter_runs()) if own else []
    suites = {suite.name: suite for suite in (recorded_suites(runs, _spaces()) if own else ())}
    cold = Searching(COLD, partial(_made_up, COLD))
    workloads = {
        "falcon": Searching("falcon", partial(_falcon, data)),
        **{name: Searching(name, partial(_made_up, name)) for name in _made_up_names() if name not in MISLEADING},
        COLD: cold,
        **{name: Searching(name, partial(_made_up, name), cold=cold) for name in MISLEADING},
        **{name: Searching(name, _known(suite)) for name, suite in suites.items()},
    }
    return Benchmark(name=NAME, workloads=tuple(workloads[name] for name in chosen(only, tuple(workloads), "workload")))


def _known(suite: Suite) -> Callable[[], Suite]:
    return lambda: suite


def _made_up(name: str) -> Suite:
    return synthetic.suite(name.partition("-")[2])


def _made_up_names() -> tuple[str, ...]:
    return tuple(f"synthetic-{family}" if family else "synthetic" for family in synthetic.FAMILIES)


def _spaces() -> dict[str, Space]:
    return {name: workload.space for name, workload in WORKLOADS.items()}


def _falcon(data: Path | None) -> Suite:
    """Read the published table. Raises `SystemUnavailable` without it."""
    if data is None:
        raise SystemUnavailable("falcon needs the folder with the published tables (--data)")
    if not (data / "falcon").is_dir():
        raise SystemUnavailable(f"falcon: {data} has no folder of that name")
    return falcon_suite(data / "falcon")
