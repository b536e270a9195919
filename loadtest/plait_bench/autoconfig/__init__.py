"""Designers on services whose every configuration is known: how many trials until a good one is found?

Workloads: `falcon` and `llm-pilot` (published tables, read from the data folder), `synthetic` (made-up services with
noise and failing configurations, in several variants), and measurements of our own diffusion engine and ranker
(`own-images`, `own-recommend`: `tables`); `load` compares ways to measure, in virtual time (`loads`). A round is a
seed: all designers get the same number of trials and the same seeds; every service is new once, tuned with the others
as its library. No designer knows the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from plait_autoconfig.space import Space
from plait_autoconfig.starter_library import starter_runs
from plait_bench.autoconfig import falcon, llm_pilot, synthetic, tables
from plait_bench.autoconfig.loads import Loads
from plait_bench.autoconfig.searching import Falcon, LlmPilot, Searching
from plait_bench.autoconfig.tasks import Suite
from plait_bench.benchmark import Benchmark, chosen
from plait_bench.errors import SystemUnavailable

NAME = "autoconfig"
SEEDS, QUICK_SEEDS = 20, 2
COLD, MISLEADING = "synthetic-cold", ("synthetic-negated", "synthetic-shuffled")
OWN = ("own-images", "own-recommend")


def benchmark(*, only: Sequence[str] = (), data: Path | None = None, recorded: Sequence[Path] = ()) -> Benchmark:
    """Make the benchmark. `recorded`: files of runs that replace the starter library. Raises `BenchError`."""
    own = recorded or not only or set(only) & set(OWN)
    runs = tables.recorded_runs(recorded) if recorded else list(starter_runs()) if own else []
    suites = {suite.name: suite for suite in (tables.recorded_suites(runs, _spaces()) if own else ())}
    cold = Searching(COLD, partial(_made_up, COLD))
    workloads = {
        "falcon": Falcon("falcon", lambda: falcon.suite(_folder("falcon", data))),
        "llm-pilot": LlmPilot("llm-pilot", lambda: llm_pilot.read(_folder("llm-pilot", data))),
        **{name: Searching(name, partial(_made_up, name)) for name in _made_up_names() if name not in MISLEADING},
        COLD: cold,
        **{name: Searching(name, partial(_made_up, name), cold=cold) for name in MISLEADING},
        **{name: Searching(name, _known(suite)) for name, suite in suites.items()},
        Loads.name: Loads(),
    }
    return Benchmark(name=NAME, workloads=tuple(workloads[name] for name in chosen(only, tuple(workloads), "workload")))


def _known(suite: Suite) -> Callable[[], Suite]:
    return lambda: suite


def _made_up(name: str) -> Suite:
    return synthetic.suite(name.partition("-")[2])


def _made_up_names() -> tuple[str, ...]:
    return tuple(f"synthetic-{family}" if family else "synthetic" for family in synthetic.FAMILIES)


def _spaces() -> dict[str, Space]:
    from plait_bench.cells.workloads import WORKLOADS  # with all of the engine

    return {name: workload.space for name, workload in WORKLOADS.items()}


def _folder(name: str, data: Path | None) -> Path:
    """Return the folder of the published table. Raises `SystemUnavailable`."""
    if data is None:
        raise SystemUnavailable(f"{name} needs the folder with the published tables (--data)")
    if not (data / name).is_dir():
        raise SystemUnavailable(f"{name}: {data} has no folder of that name")
    return data / name
