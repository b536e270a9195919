"""What designers are judged on: services whose every configuration, and so the optimum, is known, from the table of
the Falcon paper (SoCC 2022) and from our own measurements; `synthetic.py` makes up others.

Falcon: 30 models x 1,440 configurations, with Morphling's five knobs. All models share one surface and differ only by
unstructured noise, so the mean of the sources, in a fixed order, is nearly optimal, and learning from trials cannot
help.

Our own: searches are replayed on what `cells.py` has recorded, the runs of the starter library. A service whose every
cell was measured becomes a service to tune, with all others of its space as the library; for the others a sample is
enough. A search sees a cell's trials one after the other; the truth by which searches are judged is their mean, and
cells that the trials cannot tell from the best one tie with it.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from plait_autoconfig.confidence import log_losses
from plait_autoconfig.designers.base import ServiceContext
from plait_autoconfig.knobs import ChoiceKnob, IntKnob
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Goal, Objective, parse_objective
from plait_autoconfig.rows import starter_runs
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, Trial, TrialOutcome, Value, cells_of
from plait_bench.benchmark import published
from plait_bench.errors import BenchError

_METRIC, _COLUMN = "goodput_per_cost", "norm.(rps/budget)"
_READ: dict[str, Callable[[str], Value]] = {
    "batchsize": int, "cpus": int, "gpumem": float, "gpupower": int, "gputype": str
}  # fmt: skip
_FALCON = Space(
    (
        ChoiceKnob(name="batchsize", values=(4, 8, 16, 32, 64, 128), ordered=True),
        IntKnob(name="cpus", low=1, high=5),
        ChoiceKnob(name="gpumem", values=(0.8, 1.2, 1.6, 2.4), ordered=True, unit="GB"),
        ChoiceKnob(name="gpupower", values=(50, 75, 100), ordered=True, unit="%"),
        ChoiceKnob(name="gputype", values=("M60", "K80", "T4", "V100")),
    )
)
ENGINE = Space(
    (
        ChoiceKnob(name="largest_batch", values=(1, 4, 8, 16), ordered=True, unit="images"),
        ChoiceKnob(name="batch_wait_ms", values=(0.0, 10.0, 50.0), ordered=True, unit="ms"),
        ChoiceKnob(name="threads", values=(1, 2), ordered=True, unit="cores"),
        ChoiceKnob(name="exact", values=("never", "always")),
        ChoiceKnob(name="placement", values=("local",)),
    )
)
"""The space of 48 cells. Without Serve, ControlNets have only one placement; it is a knob because other services
have more."""

RANK = Space(
    (
        ChoiceKnob(name="cn_threads", values=(1, 2), ordered=True, unit="cores"),
        ChoiceKnob(name="hn_threads", values=(1, 2), ordered=True, unit="cores"),
        ChoiceKnob(name="largest_batch_rows", values=(64, 256, 4096), ordered=True, unit="candidates"),
        ChoiceKnob(name="window", values=(1, 4), ordered=True, unit="batches"),
        ChoiceKnob(name="wire", values=("float32", "float16")),
        ChoiceKnob(name="cns", values=(1,), unit="replicas"),
    )
)
"""The space of 48 cells. There is only one CN; their number is a knob because other services have more."""

SPACES = {"images": ENGINE, "recommend": RANK}

_TRIALS = 60
_SURE = 1.96  # standard deviations, 95 %

MeasureCell: TypeAlias = Callable[[Config, int], TrialOutcome]
"""`(configuration, seed)`: one short trial, a closed loop of callers with the same requests for every
configuration."""


@dataclass(frozen=True)
class Service:
    """One service of a table: the true outcome of every cell, in the order of `space.cells()`.

    `shown`: the outcomes that successive trials of a cell show; where empty, the truth with `noise` (standard
    deviation of the logarithm of each metric). `tie`: the share of the optimum within which a cell is as good as it, as
    far as the measurements tell. `library`: the past services to learn from.
    """

    space: Space
    objective: Objective
    truth: tuple[TrialOutcome, ...]
    context: ServiceContext
    noise: float = 0.0
    tie: float = 0.0
    shown: Mapping[int, tuple[TrialOutcome, ...]] = field(default_factory=dict)
    library: tuple[LibraryRun, ...] = ()

    @property
    def name(self) -> str:
        """The service's."""
        return self.context.service

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """The goal by cell, (N,), as a positive number where higher is better; 0 where infeasible."""
        goal = self.objective.require_one_goal()
        known = [it.metrics[goal.metric] if self.objective.feasible(it) else None for it in self.truth]
        return np.array([0.0 if it is None else it if goal.direction == "max" else 1.0 / it for it in known])

    @cached_property
    def index(self) -> dict[object, int]:
        """The index of each cell, by key."""
        return {self.space.key(cell): at for at, cell in enumerate(self.space.cells())}

    def regret(self, at: int) -> float:
        """Return 1 - value / optimum of a cell; 1 if it is infeasible, 0 if it ties with the optimum."""
        found = float(1.0 - self.values[at] / self.values.max())
        return 0.0 if found <= self.tie else found

    def show(self, at: int, repeat: int, rng: np.random.Generator) -> TrialOutcome:
        """Return the outcome that a trial of the cell shows."""
        if at in self.shown:
            return self.shown[at][repeat % len(self.shown[at])]
        truth = self.truth[at]
        if truth.failure is not None or self.noise == 0.0:
            return truth
        factors = np.exp(self.noise * rng.standard_normal(len(truth.metrics)))
        return TrialOutcome(metrics={name: v * f for (name, v), f in zip(truth.metrics.items(), factors, strict=True)})

    def as_run(self) -> LibraryRun:
        """Return what a library would hold for this service: all cells once."""
        cells = enumerate(zip(self.space.cells(), self.truth, strict=True))
        return LibraryRun(
            run_id=self.name,
            service=self.name,
            trials=tuple(Trial(number=n, config=config, outcome=outcome) for n, (config, outcome) in cells),
            workload=self.context.workload,
            hardware=self.context.hardware,
        )


@dataclass(frozen=True)
class Suite:
    """A workload of the benchmark. `trials`: how many each search may use."""

    services: tuple[Service, ...]
    trials: int


def leave_one_out(services: Sequence[Service], runs: Sequence[LibraryRun]) -> tuple[Service, ...]:
    """Return each service with the runs of all others as its library."""
    return tuple(replace(one, library=tuple(run for run in runs if run.run_id != one.name)) for one in services)


def falcon_suite(data: Path | None) -> Suite:
    """Return all 30 models, each with the 29 others as its library. Raises `SystemUnavailable` without the published
    tables, `BenchError` if they are not as published."""
    folder = published(data, "falcon")
    paths = sorted(path for part in ("sources", "targets") for path in (folder / part).glob("reg-*.csv"))
    if not paths:
        raise BenchError(f"{folder} has no reg-*.csv")
    services = list({path.name: _falcon_service(path) for path in paths}.values())
    return Suite(services=leave_one_out(services, [each.as_run() for each in services]), trials=30)


def _falcon_service(path: Path) -> Service:
    found = {}
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            config = {name: read(row[name]) for name, read in _READ.items()}
            found[_FALCON.key(config)] = TrialOutcome.measured(**{_METRIC: float(row[_COLUMN])})
    cells = [_FALCON.key(cell) for cell in _FALCON.cells()]
    if set(found) != set(cells):
        raise BenchError(f"{path} does not have each of the {len(cells)} configurations once")
    return Service(
        space=_FALCON,
        objective=Objective((Goal(_METRIC, "max"),)),
        truth=tuple(found[cell] for cell in cells),
        context=ServiceContext(service=path.stem.removeprefix("reg-")),
    )


def own_suite(service: str) -> Suite:
    """Return what the starter library has of a service of ours."""
    return recorded_suite([run for run in starter_runs() if run.service == service], SPACES[service])


def recorded_suite(runs: Sequence[LibraryRun], space: Space) -> Suite:
    """Return the suite of a service's runs: those that are complete, with all as their library."""
    known = [own for run in runs if (own := _own_service(run, space)) is not None]
    trials = min(_TRIALS, *(len(service.truth) for service in known))
    return Suite(services=leave_one_out(known, runs), trials=trials)


def _own_service(run: LibraryRun, space: Space) -> Service | None:
    """Return the run as a service, or None unless every cell was measured."""
    objective = parse_objective(run.goals[0])
    cells = {space.key(cell.config): cell for cell in cells_of(run.trials)}
    keys = [space.key(cell) for cell in space.cells()]
    if not cells.keys() >= set(keys):
        return None
    truth = tuple(cells[key].outcome for key in keys)
    shown = {at: tuple(trial.outcome for trial in cells[key].trials) for at, key in enumerate(keys)}
    context = ServiceContext(service=run.run_id, workload=run.workload, hardware=run.hardware, versions=run.versions)
    tie = _tie(list(shown.values()), objective)
    return Service(space=space, objective=objective, truth=truth, context=context, tie=tie, shown=shown)


def _tie(shown: Sequence[Sequence[TrialOutcome]], objective: Objective) -> float:
    """Return by which share two cells must differ to differ with 95 % certainty; 0 unless cells have repeats.

    Trials scatter by a factor; its variance is estimated from the median of the cells' own, which one glitch does not
    move (of n trials it is that of chi-squared with n - 1 degrees of freedom, over n - 1).
    """
    logs = [
        each
        for outcomes in shown
        if len(each := log_losses(objective.require_one_goal(), outcomes)) > 1 and np.isfinite(each).all()
    ]
    if not logs:
        return 0.0
    count = min(map(len, logs))
    variance = float(np.median([each[:count].var(ddof=1) for each in logs])) * (count - 1) / chi2.median(count - 1)
    return 1.0 - math.exp(-_SURE * math.sqrt(2.0 * variance / count))


def outcome_of(latencies_ms: Sequence[float], wall_s: float, *, slo_ms: float, cores: float) -> TrialOutcome:
    """Compute the metrics of a trial, under the names that a tuning job uses. `cores` are paid for, 1 an hour each.

    The p99 of a few dozen requests is about their largest: short trials are noisy, and their repeats show it.
    """
    in_time = sum(latency <= slo_ms for latency in latencies_ms)
    goodput_per_s = in_time / wall_s
    return TrialOutcome.measured(
        goodput_per_s=goodput_per_s,
        attainment=in_time / len(latencies_ms),
        error_rate=0.0,  # a request that fails ends the measurement
        achieved_per_s=len(latencies_ms) / wall_s,
        p50_ms=statistics.median(latencies_ms),
        p99_ms=statistics.quantiles(latencies_ms, n=100, method="inclusive")[98],
        cost_per_hour=cores,
        goodput_per_cost=goodput_per_s / cores,
    )
