"""What a designer is judged on: a service whose every configuration, and so the optimum, is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.designers.protocols import ServiceContext
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, Trial, TrialOutcome


@dataclass(frozen=True)
class Service:
    """One service of a table: the true outcome of every cell, in the order of `space.cells()`.

    `shown`: the outcomes that successive trials of a cell show; where empty, the truth with `noise` (standard
    deviation of the logarithm of each metric). `tie`: the share of the optimum within which a cell is as good as it, as
    far as the measurements tell.
    """

    space: Space
    objective: Objective
    truth: tuple[TrialOutcome, ...]
    context: ServiceContext
    noise: float = 0.0
    tie: float = 0.0
    shown: Mapping[int, tuple[TrialOutcome, ...]] = field(default_factory=dict)

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """The goal by cell, (N,), as a positive number where higher is better; 0 where infeasible."""
        goal = self.objective.require_one_goal()
        found = np.zeros(len(self.truth))
        for index, outcome in enumerate(self.truth):
            if self.objective.feasible(outcome):
                value = outcome.metrics[goal.metric]
                found[index] = value if goal.direction == "max" else 1.0 / value
        return found

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

    def as_run(self, cells: Sequence[int] | None = None) -> LibraryRun:
        """Return what a library would hold for this service: all cells once, or some."""
        configs: Sequence[Config] = self.space.cells()
        some = range(len(configs)) if cells is None else cells
        return LibraryRun(
            run_id=self.context.service,
            service=self.context.service,
            trials=tuple(Trial(number=n, config=configs[at], outcome=self.truth[at]) for n, at in enumerate(some)),
            workload=self.context.workload,
            hardware=self.context.hardware,
        )


@dataclass(frozen=True)
class TuningTask:
    """A service to tune, and the past services to learn from. `name`: of the service."""

    name: str
    service: Service
    library: tuple[LibraryRun, ...]


@dataclass(frozen=True)
class Suite:
    """A workload of the benchmark. `trials`: how many each search may use; `marks`: after which of them regret is
    reported.

    `shared`: all tasks have the same space and library, so that what is learned from it can be shared.
    """

    name: str
    tasks: tuple[TuningTask, ...]
    trials: int
    marks: tuple[int, ...]
    shared: bool = False


def leave_one_out(services: Mapping[str, Service]) -> tuple[TuningTask, ...]:
    """Make one task per service, with all other services as its library."""
    runs = {name: service.as_run() for name, service in services.items()}
    return tuple(
        TuningTask(name=name, service=service, library=tuple(run for other, run in runs.items() if other != name))
        for name, service in services.items()
    )
