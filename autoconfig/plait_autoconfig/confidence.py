"""Which configuration to recommend, and which to measure again before: one rule, for jobs and for the bench.

Everything that was measured counts, in the search and after it. The true (log) losses of the configurations are taken
to scatter normally, the measurements of each around its own with one noise, estimated from all that was repeated. So
a configuration that was measured once and did well is thought to be somewhat worse than it looked, and one that was
measured often, such as the reference, to be what it looked: the best of many trials is partly the luckiest. The
leader is the best in the mean of this posterior of those that more probably keep every limit than not.

Runs go where they decide (as in LUCB, Kalyanakrishnan et al., ICML 2012): to whichever is likeliest to take the
leader's place, because it may be better or because the leader may break a limit, and to the leader itself, until
nobody has a chance worth a run. What is left of the budget shows the leader and the reference afresh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.objective import Goal, Limit, Objective
from plait_autoconfig.values import TrialOutcome, pooled

TOLERANCE = 0.01
"""Two candidates that differ by no more than this share are equally good: nobody waits for them to be told apart."""
NOISE = 0.05
"""The assumed relative noise of a measurement, which counts as `_NOISE_COUNTS` repeats."""
_NOISE_COUNTS = 2.0
_LEAST_SPREAD = 0.3  # of the true losses, in units of the noise: what is tried differs by something
_FLOOR = 0.02
"""The lower bound of a metric as a share of its best value: 50 times worse is bad enough, and a goodput of 0 has no
logarithm."""
_FAR = 2.0  # logarithms from a limit: further is no more certain
_DRAWS = 2000

_Floats = NDArray[np.float64]


def log_losses(goal: Goal, outcomes: Sequence[TrialOutcome]) -> _Floats:
    """Return one number per outcome of one service, lower is better: ratios become differences. Failures are NaN.

    A metric of 0 counts as half of the least, or as `_FLOOR` of the largest where that is good. One that is somewhere
    negative has no logarithm: then it is used unchanged.
    """
    raw = np.array([np.nan if each.failure is not None else each.metrics[goal.metric] for each in outcomes])
    sign = 1.0 if goal.direction == "min" else -1.0
    known = raw[np.isfinite(raw)]
    if not known.size or known.min() < 0.0 or known.max() == 0.0:
        return sign * raw
    lowest = 0.5 * known[known > 0].min() if goal.direction == "min" else _FLOOR * known.max()
    return np.asarray(sign * np.log(np.maximum(raw, lowest)))


def noise_of(losses: Sequence[_Floats]) -> float:
    """Return the standard deviation of a measurement about its configuration; `losses`: all of each (n,), n > 0."""
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in losses)
    repeats = sum(len(each) - 1 for each in losses)
    return math.sqrt((_NOISE_COUNTS * NOISE**2 + squares) / (_NOISE_COUNTS + repeats))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is known after some measurements. `leader`: the index of the best candidate, None if none keeps every limit;
    `sure`: the probability that it does, and that no other is better by more than the tolerance; `wanted`: whom to
    measure again to become surer, first the one that helps most; empty if nobody has a chance worth a run."""

    leader: int | None
    sure: float
    wanted: tuple[int, ...]


def verdict(
    objective: Objective, groups: Sequence[Sequence[TrialOutcome]], *, sure: float, reference: int | None = None
) -> Verdict:
    """Return who leads. `groups`: for each candidate all its valid outcomes, at least one; one failure rules it out.

    `sure`: a candidate with a chance of less than 1 - `sure` is not worth a run, and the `reference` (an index) leads
    until, with this probability, another is better or it breaks a limit itself: what runs is not changed for a guess.
    """
    alive = [at for at, group in enumerate(groups) if all(each.failure is None for each in group)]
    ran = [groups[at] for at in alive]
    feasible = np.prod([np.ones(len(ran)), *(_kept(limit, ran) for limit in objective.limits)], axis=0)
    allowed = [at for at, group in enumerate(ran) if (known := pooled(group)) and objective.feasible(known)]
    if not allowed:
        doubtful = [int(at) for at in np.argsort(-feasible, kind="stable") if feasible[at] > 1.0 - sure]
        return Verdict(leader=None, sure=0.0, wanted=tuple(alive[at] for at in doubtful))
    mean, variance = _posterior(objective.require_one_goal(), ran)
    leader = min(allowed, key=lambda at: mean[at])
    if reference is not None and reference in alive:
        own = alive.index(reference)
        worse = _normal(np.array([(mean[leader] - mean[own]) / np.sqrt(variance[own] + variance[leader])]))[0]
        if feasible[own] * worse > 1.0 - sure:
            leader = own
    chances = feasible * _normal((mean[leader] - mean - TOLERANCE) / np.sqrt(variance + variance[leader]))
    chances[leader] = 1.0 - feasible[leader]
    wanted = [int(at) for at in np.argsort(-chances, kind="stable") if chances[at] > 1.0 - sure]
    if wanted and feasible[wanted[0]] >= sure and variance[leader] > variance[wanted[0]]:
        wanted.insert(0, leader)  # what less is known of tells the two apart sooner
    rng = np.random.default_rng(0)
    drawn = mean + np.sqrt(variance) * rng.standard_normal((_DRAWS, len(ran)))
    drawn[rng.random(drawn.shape) > feasible] = np.inf
    return Verdict(
        leader=alive[leader],
        sure=float(np.mean(np.isfinite(drawn[:, leader]) & (drawn[:, leader] <= drawn.min(1) + TOLERANCE))),
        wanted=tuple(alive[at] for at in dict.fromkeys(wanted)),
    )


def next_runs(now: Verdict, fresh: Sequence[int], reference: int | None, *, most: int, times: int) -> tuple[int, ...]:
    """Return whom to measure next, the most useful first; empty when that is over.

    `fresh`: how often each candidate was measured since the search; at most `most` runs in all, of which the leader and
    the reference get `times` each.
    """
    left = most - sum(fresh)
    shown = [at for at in dict.fromkeys((reference, now.leader)) if at is not None and fresh[at] < times]
    if left <= 0 or (now.leader is None and not now.wanted):
        return ()
    if now.wanted and (now.leader is None or left > sum(times - fresh[at] for at in shown)):
        return now.wanted
    return tuple(sorted(shown, key=lambda at: fresh[at]))


def _posterior(goal: Goal, groups: Sequence[Sequence[TrialOutcome]]) -> tuple[_Floats, _Floats]:
    """Return mean and variance of the true log loss of each group (n,)."""
    counts = np.array([float(len(group)) for group in groups])
    losses = np.split(
        log_losses(goal, [each for group in groups for each in group]), np.cumsum(counts)[:-1].astype(int)
    )
    means = np.array([each.mean() for each in losses])
    noise2 = noise_of(losses) ** 2
    own = noise2 / counts
    spread2 = max(float(means.var() - own.mean()), _LEAST_SPREAD**2 * noise2)
    variance = 1.0 / (1.0 / own + 1.0 / spread2)
    return variance * (means / own + means.mean() / spread2), variance


def _kept(limit: Limit, groups: Sequence[Sequence[TrialOutcome]]) -> _Floats:
    """Return the probability that each group's mean keeps the limit (n,); without a repeat, what was measured holds."""
    beyond = [np.array([_beyond(limit, each) for each in group]) for group in groups]
    means = np.array([each.mean() for each in beyond])
    counts = np.array([float(len(each)) for each in beyond])
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in beyond)
    noise = math.sqrt(squares / max(1.0, float((counts - 1.0).sum())))
    return np.where(means <= 0.0, 1.0, 0.0) if noise == 0.0 else _normal(-means * np.sqrt(counts) / noise)


def _beyond(limit: Limit, outcome: TrialOutcome) -> float:
    """Return how far beyond a limit, as a logarithm if both are positive."""
    value = outcome.metrics[limit.metric]
    if value <= 0.0 or limit.value <= 0.0:
        return float(np.clip(limit.excess(outcome.metrics), -_FAR, _FAR))
    over = math.log(value / limit.value)
    return float(np.clip(over if limit.bound == "at_most" else -over, -_FAR, _FAR))


def _normal(values: _Floats) -> _Floats:
    """Return the normal distribution's probability below each value. The server's processes do without SciPy."""
    return np.array([0.5 * math.erfc(-each / math.sqrt(2.0)) for each in values])
