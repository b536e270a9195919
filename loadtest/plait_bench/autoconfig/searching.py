"""The workloads: a round is a seed, in which every service of the suite is searched once by each designer.

What a designer learns from its library is part of it, not of a search: it is learned once for each service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from plait_autoconfig.confidence import next_runs, verdict
from plait_autoconfig.designers import maker_of
from plait_autoconfig.designers.base import Designer
from plait_autoconfig.designers.plait_designer import PlaitDesigner, Pretrained
from plait_autoconfig.errors import Exhausted
from plait_autoconfig.jobs.spec import Confirm
from plait_autoconfig.values import Trial, TrialOutcome
from plait_bench.autoconfig.services import Service, Suite
from plait_bench.benchmark import Reading, Say, Workload, readings

OURS = "plait"
SYSTEMS = (OURS, "random", "optuna-tpe", "optuna-gp")

Make = Callable[[Service, int], Designer]
"""`(service, seed) -> a fresh designer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The progress of a search: by trial the true `regrets` of the configuration that would be applied then, and
    `at_end`, after the last one, that of what a job would recommend once it has measured again.

    A search that tried every cell ends early; its last regret holds from then on.
    """

    regrets: tuple[float, ...]
    at_end: float = 1.0

    def regret_at(self, trial: int) -> float:
        """Return the regret after that many trials."""
        return self.regrets[min(trial, len(self.regrets)) - 1]

    def trials_to(self, regret: float) -> int:
        """Return the first trial with at most this regret; one more than there were, if none had."""
        return next((n for n, each in enumerate(self.regrets, 1) if each <= regret + 1e-12), len(self.regrets) + 1)


def play(make: Make, service: Service, *, seed: int, trials: int) -> Curve:
    """Ask the designer for a cell, look up its outcome and report it back, `trials` times; then measure again as a job
    does. What would be applied is decided as in a job (`confidence`)."""
    designer = make(service, seed)
    rng = np.random.default_rng([seed, 1])
    shown: dict[int, list[TrialOutcome]] = {}
    regrets: list[float] = []
    for number in range(trials):
        try:
            config = designer.ask()
        except Exhausted:
            break
        at = service.index[service.space.key(config)]
        repeat = len(shown.get(at, ()))
        outcome = service.show(at, repeat, rng)
        shown.setdefault(at, []).append(outcome)
        designer.tell(Trial(number=number, config=config, outcome=outcome, seed=seed, repeat=repeat))
        leader = verdict(service.objective, list(shown.values()), sure=Confirm().sure).leader
        regrets.append(1.0 if leader is None else service.regret(list(shown)[leader]))
    last = measured_again(service, shown, rng)
    return Curve(regrets=tuple(regrets), at_end=1.0 if last is None else service.regret(last))


def measured_again(
    service: Service, shown: dict[int, list[TrialOutcome]], rng: np.random.Generator, *, reference: int | None = None
) -> int | None:
    """Return the cell that a job recommends after a search. `shown`: the outcomes of each cell that was tried, to which
    those of the confirmation are added; `reference`: one of the cells."""
    confirm, cells = Confirm(), list(shown)
    fresh, own = [0] * len(cells), None if reference is None else cells.index(reference)
    while True:
        now = verdict(service.objective, list(shown.values()), sure=confirm.sure, reference=own)
        order = next_runs(now, fresh, own, most=confirm.runs, times=confirm.times)
        if not order:
            return None if now.leader is None else cells[now.leader]
        at = cells[order[0]]
        fresh[order[0]] += 1
        shown[at].append(service.show(at, len(shown[at]), rng))


MARKS = (1, 3, 5, 10, 20, 30)
"""The trials after which regret is reported, as far as a suite has so many."""


class Searching(Workload):
    """A suite as a workload. `cold`: the same services without a library, where this suite's misleads; our designer
    alone takes part, and is compared with its own searches there."""

    metrics: Mapping[str, str] = {
        **{f"regret_at_{mark}": "share" for mark in (*MARKS, "end")},
        **dict.fromkeys(("trials_to_5pct", "extra_trials_to_5pct"), "trials"),
    }
    untimed = metrics
    compared = frozenset({"trials_to_5pct"})
    suite: Suite

    def __init__(self, name: str, load: Callable[[], Suite], cold: Searching | None = None) -> None:
        self.name, self._load, self._cold = name, load, cold
        self.systems = SYSTEMS if cold is None else (OURS,)
        self.played: dict[str, dict[int, list[Curve]]] = {}
        self._learned: dict[str, Pretrained] = {}

    def prepare(self, say: Say) -> None:
        """Load the suite. Raises `SystemUnavailable` without its data."""
        self.suite = self._load()

    def take(self, system: str, number: int) -> list[Reading]:
        """Search every service with a seed."""
        suite, seed, make = self.suite, number - 1, partial(self._designer, system)
        curves = [play(make, service, seed=seed, trials=suite.trials) for service in suite.services]
        self.played.setdefault(system, {})[seed] = curves
        return self.readings(system, seed, curves)

    def _designer(self, system: str, service: Service, seed: int) -> Designer:
        given: dict[str, Any] = {"seed": seed, "library": service.library, "context": service.context}
        if system != OURS:
            return maker_of(system)(service.space, service.objective, **given)
        if service.name not in self._learned:
            self._learned[service.name] = PlaitDesigner(service.space, service.objective, **given).pretrained
        return PlaitDesigner(service.space, service.objective, **given, pretrained=self._learned[service.name])

    def readings(self, system: str, seed: int, curves: Sequence[Curve]) -> list[Reading]:
        """Summarise the searches of one seed over the services."""
        marks = [mark for mark in MARKS if mark <= self.suite.trials]
        found = {f"regret_at_{mark}": fmean(curve.regret_at(mark) for curve in curves) for mark in marks}
        found["regret_at_end"] = fmean(curve.at_end for curve in curves)
        found["trials_to_5pct"] = _to_5pct(curves)
        if self._cold is not None and seed in self._cold.played.get(system, {}):
            found["extra_trials_to_5pct"] = found["trials_to_5pct"] - _to_5pct(self._cold.played[system][seed])
        return readings(found)


def _to_5pct(curves: Sequence[Curve]) -> float:
    return fmean(curve.trials_to(0.05) for curve in curves)
