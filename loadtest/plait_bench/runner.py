"""The shared runner: finds each system's best layout, warms up, checks agreement, and takes the rounds in turn.

Fairness: every system gets the layout that is best for it on each workload; a round runs all systems one after the
other (A B C, A B C, ...), and ratios are taken inside rounds, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from plait_bench.benchmark import Benchmark, Fleet, MetricValue, ProcessLayout, ResultRow, RunSample, System, Workload
from plait_bench.errors import SystemUnavailable
from plait_bench.summary import ValueSummary, pairwise_ratio

OpenFleet = Callable[[System, int], Fleet]
"""``(system, processes) -> its workers``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """``rounds`` are measured on ``cores`` cores; a layout is tried ``trials`` times while the best is looked for."""

    rounds: int
    cores: int
    trials: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """``ratios``: ``workload:metric:ours/theirs``. ``left_out``: why a system took no part."""

    rows: tuple[ResultRow, ...]
    ratios: Mapping[str, ValueSummary]
    left_out: Mapping[str, str]


def joined(parts: Sequence[Result]) -> Result:
    """All parts' rows, ratios and reasons as one."""
    return Result(
        rows=tuple(row for part in parts for row in part.rows),
        ratios={key: ratio for part in parts for key, ratio in part.ratios.items()},
        left_out={name: why for part in parts for name, why in part.left_out.items()},
    )


def layouts(cores: int) -> tuple[ProcessLayout, ...]:
    """Processes x threads worth trying: one core, and the whole machine as 1, 2 or 4 processes."""
    wide = [ProcessLayout(processes=n, threads=cores // n) for n in (1, 2, 4) if n <= cores]
    return tuple(dict.fromkeys([ProcessLayout(processes=1, threads=1), *wide]))


def layouts_for(workload: Workload, cores: int) -> tuple[ProcessLayout, ...]:
    """Those of `layouts` in which every process has something to do."""
    useful = 1 if workload.one_by_one else len(workload.items)
    return tuple(layout for layout in layouts(cores) if layout.processes <= useful)


def run(benchmark: Benchmark, plan: RunPlan, *, open_fleet: OpenFleet, say: Callable[[str], None]) -> Result:
    """Runs the whole benchmark. Raises `BenchError`; progress goes to ``say``."""
    rows: list[ResultRow] = []
    ratios: dict[str, ValueSummary] = {}
    with ExitStack() as stack:
        fleets = _Fleets(benchmark, plan.cores, open_fleet, stack, say)
        for workload in benchmark.workloads:
            present = fleets.of(workload)
            best: dict[str, ProcessLayout] = {}
            for name, fleet in present.items():
                best[name], tried = find_best_layout(fleet, fleets.system(name).variants(workload), workload, plan)
                say(f"{workload.name}: {name} {_times(tried)} -> {best[name]}")
            rows += _check(benchmark, workload, present)
            taken = _rounds(present, workload, plan, say)
            measured = {
                name: [benchmark.measures(workload, sample) for sample in samples] for name, samples in taken.items()
            }
            rows += [row for name in measured for row in _rows(name, workload.name, measured[name], best[name])]
            new = _ratios(benchmark.ours, workload.name, measured)
            for key, ratio in new.items():
                say(f"{key} {ratio.value:.2f} (p20 {ratio.p20:.2f}, p80 {ratio.p80:.2f})")
            ratios |= new
        return Result(rows=tuple(rows), ratios=ratios, left_out=dict(fleets.left_out))


class _Fleets:
    """Workers by system, started when a workload first needs them and kept until the end."""

    def __init__(
        self, benchmark: Benchmark, cores: int, open_fleet: OpenFleet, stack: ExitStack, say: Callable[[str], None]
    ) -> None:
        self._benchmark = benchmark
        self._open_fleet = open_fleet
        self._cores = cores
        self._stack = stack
        self._say = say
        self._open: dict[str, Fleet] = {}
        self.left_out: dict[str, str] = {}

    def system(self, name: str) -> System:
        return next(system for system in self._benchmark.systems if system.name == name)

    def of(self, workload: Workload) -> dict[str, Fleet]:
        """The fleets that take part, in the benchmark's order."""
        wanted = [
            system for system in self._benchmark.systems if workload.systems is None or system.name in workload.systems
        ]
        for system in wanted:
            if system.name not in self._open and system.name not in self.left_out:
                self._start(system)
        return {system.name: self._open[system.name] for system in wanted if system.name in self._open}

    def _start(self, system: System) -> None:
        processes = max(
            layout.processes
            for workload in self._benchmark.workloads
            if workload.systems is None or system.name in workload.systems
            for layout in layouts_for(workload, self._cores)
        )
        self._say(f"starting {system.name} in {processes} process(es)")
        try:
            fleet = self._open_fleet(system, processes)
        except SystemUnavailable as error:
            if system.name == self._benchmark.ours:
                raise
            self.left_out[system.name] = str(error)
            self._say(f"left out: {error}")
            return
        self._stack.callback(fleet.close)
        self._open[system.name] = fleet


def find_best_layout(
    fleet: Fleet, variants: Sequence[str], workload: Workload, plan: RunPlan
) -> tuple[ProcessLayout, dict[ProcessLayout, float]]:
    """The fastest of a few trials, and the seconds of all: first processes x threads, then the variants.

    The fleet is left in the best.
    """
    tried: dict[ProcessLayout, float] = {}
    for layout in layouts_for(workload, plan.cores):
        _try(fleet, replace(layout, variant=variants[0]), workload, plan, tried)
    shape = min(tried, key=lambda layout: tried[layout])
    for variant in variants[1:]:
        _try(fleet, replace(shape, variant=variant), workload, plan, tried)
    best = min(tried, key=lambda layout: tried[layout])
    fleet.configure(best)
    return best, tried


def _try(
    fleet: Fleet, layout: ProcessLayout, workload: Workload, plan: RunPlan, tried: dict[ProcessLayout, float]
) -> None:
    """Notes the seconds of the fastest of ``plan.trials`` runs after a warm-up."""
    fleet.configure(layout)
    fleet.run(workload.warm_up, one_by_one=workload.one_by_one)
    tried[layout] = min(fleet.run(workload.items, one_by_one=workload.one_by_one).wall_s for _ in range(plan.trials))


def _times(tried: Mapping[ProcessLayout, float]) -> str:
    return ", ".join(f"{layout} {seconds:.2f} s" for layout, seconds in tried.items())


def _check(benchmark: Benchmark, workload: Workload, fleets: Mapping[str, Fleet]) -> list[ResultRow]:
    """Every system's results in its best layout, compared; also the last warm-up before the rounds."""
    results = {
        name: fleet.run(workload.items, one_by_one=workload.one_by_one, keep=True).results
        for name, fleet in fleets.items()
    }
    return benchmark.check(workload, results)


def _rounds(
    fleets: Mapping[str, Fleet], workload: Workload, plan: RunPlan, say: Callable[[str], None]
) -> dict[str, list[RunSample]]:
    samples: dict[str, list[RunSample]] = {name: [] for name in fleets}
    for i in range(plan.rounds):
        for name, fleet in fleets.items():
            samples[name].append(fleet.run(workload.items, one_by_one=workload.one_by_one))
        walls = ", ".join(f"{name} {taken[-1].wall_s:.2f} s" for name, taken in samples.items())
        say(f"{workload.name}: round {i + 1} of {plan.rounds}: {walls}")
    return samples


def _rows(
    system: str, workload: str, measured: Sequence[Mapping[str, MetricValue]], layout: ProcessLayout
) -> list[ResultRow]:
    return [
        ResultRow.of(
            [measures[metric].value for measures in measured],
            system=system, workload=workload, metric=metric, unit=first.unit, layout=str(layout),
        )
        for metric, first in measured[0].items()
    ]  # fmt: skip


def _ratios(
    ours: str, workload: str, measured: Mapping[str, Sequence[Mapping[str, MetricValue]]]
) -> dict[str, ValueSummary]:
    if ours not in measured:
        return {}
    return {
        f"{workload}:{metric}:{ours}/{theirs}": pairwise_ratio(
            [measures[metric].value for measures in measured[ours]],
            [measures[metric].value for measures in measured[theirs]],
        )
        for theirs in measured
        if theirs != ours
        for metric in measured[ours][0]
    }
