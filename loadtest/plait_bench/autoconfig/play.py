"""One search of one designer on one task, and its results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from plait_autoconfig.confidence import log_loss, standing
from plait_autoconfig.designers.protocols import Designer, Recommends
from plait_autoconfig.errors import Exhausted
from plait_autoconfig.objective import Objective
from plait_autoconfig.values import Config, Trial, cells_of
from plait_bench.autoconfig.tasks import Service, TuningTask

CONFIRM_AFTER, CANDIDATES, CONFIRMATIONS, SURE = 20, 4, 10, 0.9

Make = Callable[[TuningTask, int], Designer]
"""`(task, seed) -> a fresh designer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The progress of a search, by trial: the true `regrets` of the configuration that would be applied then, and which
    trials were `bad`.

    A search that tried every cell ends early; its last regret holds from then on. `ask_s`: time per proposal.
    `confirmed`: the regret of what is recommended after `CONFIRM_AFTER` trials, when the best candidates have been
    measured again; None for a shorter search.
    """

    regrets: tuple[float, ...]
    bad: tuple[bool, ...]
    ask_s: tuple[float, ...]
    confirmed: float | None = None

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

    What would be applied is what the designer thinks is best of what it tried, or the best outcome shown if it has no
    opinion (`Recommends`).
    """
    service = task.service
    designer = make(task, seed)
    rng = np.random.default_rng([seed, 1])
    played: list[Trial] = []
    regrets, bad, ask_s = [], [], []
    confirmed = None
    for number in range(trials):
        started_s = time.perf_counter()
        try:
            config = designer.ask()
        except Exhausted:
            break
        ask_s.append(time.perf_counter() - started_s)
        at = service.index[service.space.key(config)]
        repeat = sum(each.config == config for each in played)
        outcome = service.show(at, repeat, rng)
        played.append(Trial(number=number, config=config, outcome=outcome, seed=seed, repeat=repeat))
        designer.tell(played[-1])
        started_s = time.perf_counter()
        best = ranked(designer, service.objective, played)
        ask_s[-1] += time.perf_counter() - started_s  # a designer may do the work of its next proposal here
        bad.append(not service.objective.feasible(outcome))
        regrets.append(service.regret(service.index[service.space.key(best[0])]) if best else 1.0)
        if number + 1 == CONFIRM_AFTER and best:
            confirmed = _confirmed_regret(service, best[:CANDIDATES], np.random.default_rng([seed, 3]))
    return Curve(regrets=tuple(regrets), bad=tuple(bad), ask_s=tuple(ask_s), confirmed=confirmed)


def ranked(designer: Designer, objective: Objective, played: Sequence[Trial]) -> Sequence[Config]:
    """Return the feasible configurations that were tried, best first, in the opinion of the designer if it has one."""
    if isinstance(designer, Recommends):
        return designer.ranked()
    goal = objective.require_one_goal()
    feasible = [cell for cell in cells_of(played) if objective.feasible(cell.outcome)]
    return [cell.config for cell in sorted(feasible, key=lambda cell: goal.loss(cell.outcome.metrics))]


def _confirmed_regret(service: Service, candidates: Sequence[Config], rng: np.random.Generator) -> float:
    """Measure the candidates again by the rule of the tuning jobs (`confidence`), and return the winner's regret."""
    cells = [service.index[service.space.key(config)] for config in candidates]
    losses = [list[float]() for _ in cells]
    for count in range(CONFIRMATIONS + 1):
        now = standing(losses, sure=SURE, times=CONFIRMATIONS)
        if now.wanted is None or count == CONFIRMATIONS:
            break
        seen = len(losses[now.wanted])
        outcome = service.show(cells[now.wanted], seen + 1, rng)
        losses[now.wanted].append(log_loss(service.objective, outcome))
    return service.regret(cells[now.leader])
