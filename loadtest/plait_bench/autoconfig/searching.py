"""The workloads: a round is a seed, in which every service of the suite is searched once by each designer.

What a designer learns from its library is part of it, not of a search: it is learned once for each service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from plait_autoconfig.designers import make_designer
from plait_autoconfig.designers.plait_designer import PlaitDesigner, Pretrained
from plait_autoconfig.designers.protocols import Designer, Recommends
from plait_autoconfig.errors import Exhausted
from plait_autoconfig.objective import Objective
from plait_autoconfig.values import Config, Trial, cells_of
from plait_bench.autoconfig.services import Suite, TuningTask
from plait_bench.benchmark import Reading, Say, Workload, pairs_of, readings

OURS = "plait"
SYSTEMS = (OURS, "random", "optuna-tpe", "optuna-gp")

Make = Callable[[TuningTask, int], Designer]
"""`(task, seed) -> a fresh designer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The progress of a search: by trial the true `regrets` of the configuration that would be applied then.

    A search that tried every cell ends early; its last regret holds from then on.
    """

    regrets: tuple[float, ...]

    def regret_at(self, trial: int) -> float:
        """Return the regret after that many trials."""
        return self.regrets[min(trial, len(self.regrets)) - 1]

    def trials_to(self, regret: float) -> int:
        """Return the first trial with at most this regret; one more than there were, if none had."""
        return next((n for n, each in enumerate(self.regrets, 1) if each <= regret + 1e-12), len(self.regrets) + 1)


def play(make: Make, task: TuningTask, *, seed: int, trials: int) -> Curve:
    """Ask the designer for a cell, look up its outcome and report it back, `trials` times.

    What would be applied is what the designer thinks is best of what it tried, or the best outcome shown if it has no
    opinion (`Recommends`).
    """
    service = task.service
    designer = make(task, seed)
    rng = np.random.default_rng([seed, 1])
    played: list[Trial] = []
    regrets: list[float] = []
    for number in range(trials):
        try:
            config = designer.ask()
        except Exhausted:
            break
        at = service.index[service.space.key(config)]
        repeat = sum(each.config == config for each in played)
        outcome = service.show(at, repeat, rng)
        played.append(Trial(number=number, config=config, outcome=outcome, seed=seed, repeat=repeat))
        designer.tell(played[-1])
        best = _ranked(designer, service.objective, played)
        regrets.append(service.regret(service.index[service.space.key(best[0])]) if best else 1.0)
    return Curve(regrets=tuple(regrets))


def _ranked(designer: Designer, objective: Objective, played: Sequence[Trial]) -> Sequence[Config]:
    """Return the feasible configurations that were tried, best first, in the opinion of the designer if it has one."""
    if isinstance(designer, Recommends):
        return designer.ranked()
    goal = objective.require_one_goal()
    feasible = [cell for cell in cells_of(played) if objective.feasible(cell.outcome)]
    return [cell.config for cell in sorted(feasible, key=lambda cell: goal.loss(cell.outcome.metrics))]


MARKS = (1, 3, 5, 10, 20, 30)
"""The trials after which regret is reported, as far as a suite has so many."""


class Searching(Workload):
    """A suite as a workload."""

    systems: tuple[str, ...] = SYSTEMS
    ours = OURS
    pairs: tuple[tuple[str, str], ...] = pairs_of(OURS, SYSTEMS)
    cold: Searching | None = None
    metrics: dict[str, str]
    compared = frozenset({"trials_to_5pct"})
    suite: Suite

    def __init__(self, name: str, load: Callable[[], Suite]) -> None:
        self.name, self._load = name, load
        self.played: dict[str, dict[int, list[Curve]]] = {}
        self._learned: dict[str, Pretrained] = {}

    def misled(self, cold: Searching) -> None:
        """Say that this suite's library misleads: our designer alone takes part, and is compared with its own searches
        of the same services without a library."""
        self.cold, self.systems, self.pairs = cold, (OURS,), ()

    def prepare(self, say: Say) -> None:
        """Load the suite. Raises `SystemUnavailable` without its data."""
        self.suite = self._load()
        self.metrics = {f"regret_at_{mark}": "share" for mark in MARKS}
        self.metrics |= {"trials_to_5pct": "trials", "extra_trials_to_5pct": "trials"}
        self.untimed = self.metrics

    def take(self, system: str, number: int) -> list[Reading]:
        """Search every service with a seed."""
        suite, seed = self.suite, number - 1
        curves = [play(self._maker(system), task, seed=seed, trials=suite.trials) for task in suite.tasks]
        self.played.setdefault(system, {})[seed] = curves
        return self.readings(system, seed, curves)

    def _maker(self, system: str) -> Make:
        def make(task: TuningTask, seed: int) -> Designer:
            service = task.service
            given: dict[str, Any] = {"seed": seed, "library": task.library, "context": service.context}
            if system != OURS:
                return make_designer(system, service.space, service.objective, **given)
            if task.name not in self._learned:
                self._learned[task.name] = PlaitDesigner(service.space, service.objective, **given).pretrained
            return PlaitDesigner(service.space, service.objective, **given, pretrained=self._learned[task.name])

        return make

    def readings(self, system: str, seed: int, curves: Sequence[Curve]) -> list[Reading]:
        """Summarise the searches of one seed over the services."""
        marks = [mark for mark in MARKS if mark <= self.suite.trials]
        found = {f"regret_at_{mark}": fmean(curve.regret_at(mark) for curve in curves) for mark in marks}
        found["trials_to_5pct"] = _to_5pct(curves)
        if self.cold is not None and seed in self.cold.played.get(system, {}):
            found["extra_trials_to_5pct"] = found["trials_to_5pct"] - _to_5pct(self.cold.played[system][seed])
        return readings(found)


def _to_5pct(curves: Sequence[Curve]) -> float:
    return fmean(curve.trials_to(0.05) for curve in curves)
