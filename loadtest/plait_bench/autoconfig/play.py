"""One search of one designer on one task, and its results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from plait_autoconfig.designers.protocols import Designer
from plait_autoconfig.errors import Exhausted
from plait_autoconfig.values import Trial
from plait_bench.autoconfig.tasks import TuningTask

Make = Callable[[TuningTask, int], Designer]
"""``(task, seed) -> a fresh designer``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The progress of a search, by trial: the true `regrets` of the configuration that would be applied then, and which
    trials were `bad`.

    A search that tried every cell ends early; its last regret holds from then on. `ask_s`: time per proposal.
    """

    regrets: tuple[float, ...]
    bad: tuple[bool, ...]
    ask_s: tuple[float, ...]

    def regret_at(self, trial: int) -> float:
        """Return the regret after that many trials."""
        return self.regrets[min(trial, len(self.regrets)) - 1]

    def trials_to(self, regret: float) -> int:
        """Return the first trial with at most this regret; one more than there were, if none had."""
        return next((n for n, each in enumerate(self.regrets, 1) if each <= regret + 1e-12), len(self.regrets) + 1)

    def bad_between(self, first: int, last: int) -> int:
        """Count the infeasible trials, both ends included."""
        return sum(self.bad[first - 1 : last])


def ask_after_s(make: Make, task: TuningTask, *, seed: int, trials: int) -> float:
    """Return the seconds that the next proposal takes after `trials` trials of random cells."""
    service = task.service
    designer = make(task, seed)
    rng = np.random.default_rng([seed, 2])
    cells = service.space.cells()
    for number, at in enumerate(rng.permutation(len(cells))[:trials].tolist()):
        designer.tell(Trial(number=number, config=cells[at], outcome=service.show(at, 0, rng)))
    started_s = time.perf_counter()
    designer.ask()
    return time.perf_counter() - started_s


def play(make: Make, task: TuningTask, *, seed: int, trials: int) -> Curve:
    """Ask the designer for a cell, look up its outcome and report it back, `trials` times.

    The configuration that would be applied is the best of the outcomes shown.
    """
    service = task.service
    designer = make(task, seed)
    rng = np.random.default_rng([seed, 1])
    seen: list[Trial] = []
    regrets, bad, ask_s = [], [], []
    best_shown, best_regret = -np.inf, 1.0
    goal = service.objective.require_one_goal()
    for number in range(trials):
        started_s = time.perf_counter()
        try:
            config = designer.ask()
        except Exhausted:
            break
        ask_s.append(time.perf_counter() - started_s)
        at = service.index[service.space.key(config)]
        repeat = sum(each.config == config for each in seen)
        outcome = service.show(at, repeat, rng)
        seen.append(Trial(number=number, config=config, outcome=outcome, seed=seed, repeat=repeat))
        designer.tell(seen[-1])
        feasible = service.objective.feasible(outcome)
        bad.append(not feasible)
        if feasible and -goal.loss(outcome.metrics) > best_shown:
            best_shown, best_regret = -goal.loss(outcome.metrics), service.regret(at)
        regrets.append(best_regret)
    return Curve(regrets=tuple(regrets), bad=tuple(bad), ask_s=tuple(ask_s))
