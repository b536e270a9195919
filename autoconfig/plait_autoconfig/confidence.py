"""Which of the best candidates to measure again, until one of them is best with a given confidence.

What won a search was partly lucky: its trial looks better than it is. So only fresh measurements count here. The
leader and whichever candidate is likeliest to be better after all are measured in turn (as in LUCB, Kalyanakrishnan
et al., ICML 2012), until that is less likely than 1 - `sure`, or both have been measured `times` times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait_autoconfig.objective import Objective
from plait_autoconfig.values import TrialOutcome

TOLERANCE = 0.01
"""Two candidates that differ by no more than this share are equally good: nobody waits for them to be told apart."""
_FIRST, _FIRST_COUNTS = 0.05, 1.0  # the assumed relative noise, and how many repeats that guess counts as


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderOdds:
    """What is known after some measurements. `leader`: its index; `sure`: the probability that no other candidate is
    better than it by more than the tolerance; `wanted`: which one to measure next, None if that would add nothing.

    `chances`: by candidate, the probability that it is better than the leader by more than the tolerance; 1 for one
    without a measurement."""

    leader: int
    sure: float
    wanted: int | None
    chances: tuple[float, ...]


def log_loss(objective: Objective, outcome: TrialOutcome) -> float:
    """Return the logarithm of the (only) goal's metric, lower is better; infinite if it failed or is not above 0."""
    goal = objective.goals[0]
    value = outcome.metrics.get(goal.metric, 0.0)
    if value <= 0.0:
        return float("inf")
    return float(np.log(value)) if goal.direction == "min" else -float(np.log(value))


def standing(losses: Sequence[Sequence[float]], *, sure: float, times: int) -> LeaderOdds:
    """Return who leads. `losses`: for each candidate the logarithms of its fresh measurements, lower is better.

    A candidate with an infinite loss (it failed, or broke a limit) is out. Candidates are measured once each first.
    """
    alive = [at for at, each in enumerate(losses) if all(map(np.isfinite, each))]
    unseen = [at for at in alive if not losses[at]]
    if not alive or unseen:
        waiting = tuple(float(at in unseen) for at in range(len(losses)))
        leader = alive[0] if alive else 0
        return LeaderOdds(leader=leader, sure=0.0, wanted=unseen[0] if unseen else None, chances=waiting)
    noise = _noise([losses[at] for at in alive])
    means = np.array([np.mean(losses[at]) for at in alive])
    variances = np.array([noise**2 / len(losses[at]) for at in alive])
    first = int(means.argmin())
    gaps = (means[first] - means - TOLERANCE) / np.sqrt(variances + variances[first])
    chances = np.array([_normal(gap) for gap in gaps])
    chances[first] = 0.0
    rival = int(chances.argmax())
    pair = [alive[at] for at in (first, rival) if len(losses[alive[at]]) < times]
    wanted = None if 1.0 - chances[rival] >= sure or not pair else min(pair, key=lambda at: len(losses[at]))
    every = np.zeros(len(losses))
    every[alive] = chances
    certain = float(max(0.0, 1.0 - chances.sum()))
    return LeaderOdds(leader=alive[first], sure=certain, wanted=wanted, chances=tuple(every.tolist()))


def _noise(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of one measurement, in log units, from all that were repeated."""
    squares, freedom = _FIRST_COUNTS * _FIRST**2, _FIRST_COUNTS
    for group in groups:
        squares += float(((np.asarray(group) - np.mean(group)) ** 2).sum())
        freedom += len(group) - 1
    return float(np.sqrt(squares / freedom))


def _normal(value: float) -> float:
    """Return the normal distribution's probability below a value. The server's processes do without SciPy."""
    return 0.5 * math.erfc(-value / math.sqrt(2.0))
