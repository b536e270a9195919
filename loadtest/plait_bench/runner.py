"""The runner: selects each system's layout, warms up, checks agreement, interleaves the rounds, and pairs them.

Fairness. Every layout of every system gets the same number of trials, which count for nothing else; the best by the
workload's deciding metric is kept. A round measures all systems one after the other (A B C, A B C, ...), and ratios
are taken inside rounds, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median

from plait_bench.benchmark import RATIO, Reading, ResultRow, Say, Subject, Workload, chosen
from plait_bench.errors import SystemUnavailable
from plait_bench.host import HostConditions, conditions, is_busy

TRIALS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """`rounds` count; before them every layout gets `trials`, and systems that adapt to their load the time to do so
    (`settles`). `systems`: only these, if any are named."""

    rounds: int
    settles: bool = True
    trials: int = TRIALS
    systems: tuple[str, ...] = ()

    def takes(self, system: str) -> bool:
        """Return whether a system takes part."""
        return not self.systems or system in self.systems


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The result of a benchmark, or of one workload of it. `left_out`: why a system, or a workload, took no part;
    `missed`: what was promised and is not so."""

    rows: tuple[ResultRow, ...]
    left_out: Mapping[str, str]
    missed: tuple[str, ...] = ()

    @property
    def ratios(self) -> dict[str, ResultRow]:
        """The ratios, by `workload:metric:system/system`."""
        return {f"{row.workload}:{row.metric}:{row.system}": row for row in self.rows if row.unit == RATIO}


def joined(parts: Sequence[BenchResult]) -> BenchResult:
    """Combine all parts into one result."""
    return BenchResult(
        rows=tuple(row for part in parts for row in part.rows),
        left_out={name: why for part in parts for name, why in part.left_out.items()},
        missed=tuple(miss for part in parts for miss in part.missed),
    )


def run(
    workloads: Sequence[Workload], plan: RunPlan, *, say: Say, look: Callable[[], HostConditions] = conditions
) -> Iterator[BenchResult]:
    """Measure every workload in turn and yield each result once it is complete. Raises `BenchError`.

    `look` returns the host's conditions, before each round.
    """
    there = dict.fromkeys(system for workload in workloads for system in workload.systems)
    chosen(plan.systems, tuple(there), "system")
    began = look()
    for workload in workloads:
        if any(map(plan.takes, workload.systems)):
            yield _Measuring(workload, plan, say, look, began).result()


def choose_layout(workload: Workload, system: str, plan: RunPlan, say: Say) -> str:
    """Try each layout of the system `plan.trials` times and return the one with the best median.

    A single layout is not tried.
    """
    offered = workload.layouts(system)
    if len(offered) == 1:
        return offered[0]
    medians: dict[str, float] = {}
    for layout in offered:
        with workload.open(system, layout) as subject:
            subject.warm_up()
            trials = [(subject.trial or subject.measure)(number) for number in range(1, plan.trials + 1)]
        values = [reading.value for trial in trials for reading in trial if reading.metric == workload.deciding]
        medians[layout] = median(values)
        said = ", ".join(f"{value:.4g}" for value in values)
        say(f"{workload.name}: {system}, {layout}: {said} {workload.metrics[workload.deciding]}")
    return max(medians, key=lambda layout: medians[layout])


class _Measuring:
    """One workload being measured."""

    def __init__(
        self, workload: Workload, plan: RunPlan, say: Say, look: Callable[[], HostConditions], began: HostConditions
    ) -> None:
        self._workload, self._plan, self._say, self._look = workload, plan, say, look
        self._began = began
        self._rounds = min(plan.rounds, workload.most_rounds or plan.rounds)
        self._left_out: dict[str, str] = {}
        self._layouts: dict[str, str] = {}
        self._taken: dict[tuple[str, str, str], dict[int, Reading]] = {}
        self._seen: list[HostConditions] = []

    def result(self) -> BenchResult:
        """Measure the workload. Raises `BenchError`."""
        with ExitStack() as stack:
            with self._leaving_out(self._workload.name):
                stack.enter_context(self._workload.session(self._say))
            if self._left_out:
                return BenchResult(rows=(), left_out=self._left_out)
            subjects = self._open(stack)
            for subject in subjects.values():
                subject.warm_up()
            self._workload.check(subjects)
            if self._plan.settles:
                self._workload.settle(subjects)
            for number in range(1, self._rounds + 1):
                self._round(number, subjects)
            others = self._workload.conclude()
        rows = tuple(map(self._marked, [*self._rows(), *others, *self._ratios()]))
        is_whole = len(self._layouts) == len(self._workload.systems)
        missed = tuple(f"{self._workload.name}: {miss}" for miss in (self._workload.judge(rows) if is_whole else ()))
        found = BenchResult(rows=rows, left_out=self._left_out, missed=missed)
        for key, row in found.ratios.items():
            self._say(f"{key} {row.value:.2f} (p20 {row.p20:.2f}, p80 {row.p80:.2f})")
        return found

    def _open(self, stack: ExitStack) -> dict[str, Subject]:
        """Open the systems that take part, each in its best layout."""
        for system in filter(self._plan.takes, self._workload.systems):
            with self._leaving_out(system):
                self._layouts[system] = choose_layout(self._workload, system, self._plan, self._say)
        subjects: dict[str, Subject] = {}
        for system, layout in self._layouts.items():
            with self._leaving_out(system):
                subjects[system] = stack.enter_context(self._workload.open(system, layout))
        self._layouts = {system: self._layouts[system] for system in subjects}
        return subjects

    @contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """Go on without what is not available here, unless it is ours."""
        try:
            yield
        except SystemUnavailable as error:
            if name == self._workload.systems[0]:
                raise
            self._left_out[name] = str(error)
            self._say(f"left out: {error}")

    def _round(self, number: int, subjects: Mapping[str, Subject]) -> None:
        self._seen.append(self._look())
        readings = {system: subject.measure(number) for system, subject in subjects.items()}
        for reading, system in [(reading, system) for system, found in readings.items() for reading in found]:
            of = reading.system or system
            key = reading.workload or self._workload.name, of, reading.metric
            layout = reading.layout or self._layouts.get(of, "")
            self._taken.setdefault(key, {})[number] = replace(reading, layout=layout)
        said = "; ".join(f"{system} {_said(found)}" for system, found in readings.items())
        self._say(f"{self._workload.name}: round {number} of {self._rounds}: {said}")

    def _rows(self) -> list[ResultRow]:
        return [
            ResultRow.of(
                [reading.value for reading in taken.values()],
                system=system, workload=workload, metric=metric, unit=self._workload.metrics[metric],
                layout=taken[max(taken)].layout, kind=taken[max(taken)].kind,
            )
            for (workload, system, metric), taken in self._taken.items()
        ]  # fmt: skip

    def _ratios(self) -> list[ResultRow]:
        """Compute the ratios pair by pair, from the rounds that both had."""
        found = []
        compared = self._workload.compared
        for one, other in self._workload.pairs:
            for (workload, system, metric), mine in self._taken.items():
                theirs = self._taken.get((workload, other, metric))
                if system != one or theirs is None or (compared is not None and metric not in compared):
                    continue
                # A round ran both within seconds: whatever slowed the machine slowed both.
                values = [mine[number].value / theirs[number].value for number in mine if number in theirs]
                pair = f"{one}/{other}"
                found.append(ResultRow.of(values, system=pair, workload=workload, metric=metric, unit=RATIO))
        return found

    def _marked(self, row: ResultRow) -> ResultRow:
        """Return the row with the host's conditions in its rounds."""
        is_timed = row.kind == "measured" and row.metric not in self._workload.untimed
        busy = is_busy(self._began) or any(is_busy(replace(each, load=0.0)) for each in self._seen)
        return replace(
            row,
            load=tuple(each.load for each in self._seen[: max(1, len(row.rounds))]),
            wake_us=max((each.wake_us for each in self._seen), default=0.0),
            busy=busy and is_timed,
        )


def _said(readings: Sequence[Reading]) -> str:
    """Format the first few of a round's readings, for progress."""
    shown = ", ".join(f"{reading.metric} {reading.value:.4g}" for reading in readings[:4])
    return shown + (", ..." if len(readings) > 4 else "")
