"""How much load a trial needs: short looks first, longer ones only for what may still win. Pure policy.

The capacity of a configuration (the highest rate that holds the SLO) is bracketed by short runs. They start at the
rate that similar configurations reached, and a missed one says where to go next: an overloaded server still answers
about as many a second as it can. Only a bracket that reaches above the rate that the best configuration so far would
need is narrowed by runs of full length; what cannot win any more is left as it is (successive halving, Jamieson &
Talwalkar 2016, inside a trial).

A look that says more about the host than about the server moves nothing: it is taken again, `MAX_INVALID` times in a
row at most, and if that does not help the search ends with it, invalid as a whole.

At a fixed rate there is one short look, and the rest of the run follows unless the look surely loses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.designers.base import MAX_INVALID
from plait_autoconfig.objective import Goal

_FAR, _NEAR = 2.0, 1.25  # the step to another rate, without and with an expectation
_BACK = 0.95  # of what an overloaded server answered
_MIN_STEP = 1.1
_ROUNDING = 1e-9
_COARSE, _FINE = 1.4, 1.2  # brackets that are good enough for a configuration that cannot win, and for a longer run
_NEAREST, _SHARPNESS = 0.05, 4.0
_SURE, _SURE_MS = 0.2, 0.5
"""How much worse than the best, relative, a short look must be for the configuration to lose; for a latency, whose tail
a few requests make, more. Short runs of one configuration differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One run. `held`: the SLO; `answered_per_s`: answers of any latency while it lasted; `needed_per_s`: the goodput
    with which the configuration would tie with the best one so far, 0 if that is unknown. `valid`: it tells something
    about the server."""

    rate_per_s: float
    duration_s: float
    held: bool
    answered_per_s: float
    needed_per_s: float = 0.0
    valid: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LookPlan:
    """`first_per_s`: where to start; `step`: the factor to the next rate while nothing was missed. Looks take
    `short_s`, runs `long_s`; `tolerance`: the bracket's upper end over its lower end, less 1."""

    first_per_s: float
    step: float
    short_s: float
    long_s: float
    tolerance: float = 0.1
    max_looks: int = 10

    @classmethod
    def of(
        cls, first_per_s: float, *, expected_per_s: float, short_s: float, long_s: float, whole: bool = False
    ) -> Self:
        """Plan from what similar configurations reached, or, if that is 0, from `first_per_s`. `whole`: once it is
        known where to look, no run is a short one."""
        if not expected_per_s:
            return cls(first_per_s=first_per_s, step=_FAR, short_s=short_s, long_s=long_s)
        step, short_s = (_MIN_STEP, long_s) if whole else (_NEAR, short_s)
        return cls(first_per_s=expected_per_s, step=step, short_s=short_s, long_s=long_s)


def next_look(plan: LookPlan, looks: Sequence[Look]) -> tuple[float, float] | None:
    """Return rate and duration of the next run; None when the capacity is known well enough."""
    if not looks:
        return plan.first_per_s, plan.short_s
    if len(looks) >= plan.max_looks:
        return None
    if not looks[-1].valid:
        tried = looks[-1 - MAX_INVALID :]
        over = len(tried) > MAX_INVALID and not any(each.valid for each in tried)
        return None if over else (looks[-1].rate_per_s, looks[-1].duration_s)
    looks = [look for look in looks if look.valid]
    held, missed = _bracket(looks)
    if held is None:
        assert missed is not None
        return _below(missed), plan.short_s
    if missed is None:
        farther = plan.step ** sum(look.held for look in looks)  # who holds again and again is far from its capacity
        decisive = looks[-1].needed_per_s / held.rate_per_s
        return held.rate_per_s * min(_FAR, max(farther, decisive)), held.duration_s
    width = missed.rate_per_s / held.rate_per_s
    middle = (held.rate_per_s * missed.rate_per_s) ** 0.5
    if missed.rate_per_s <= looks[-1].needed_per_s:  # it cannot win
        return (middle, plan.short_s) if width > _COARSE else None
    if held.duration_s < plan.long_s:
        return (middle, plan.short_s) if width > _FINE else (held.rate_per_s, plan.long_s)
    return (middle, plan.long_s) if width > 1.0 + plan.tolerance + _ROUNDING else None


def best_look(looks: Sequence[Look]) -> int:
    """Return the index of the run that counts: the highest rate that held, by the longest run at it; if none held, the
    lowest rate, which came nearest. A search that ended with an invalid run is one itself."""
    if not looks[-1].valid:
        return len(looks) - 1
    valid = [look for look in looks if look.valid]
    held, _ = _bracket(valid)
    return looks.index(held or min(valid, key=lambda look: look.rate_per_s))


def look_for_capacity(run: Callable[[float, float], Look], plan: LookPlan) -> list[Look]:
    """Return the runs of a search, in order. `run`: from rate and duration to what was seen."""
    looks: list[Look] = []
    while (wanted := next_look(plan, looks)) is not None:
        looks.append(run(*wanted))
    return looks


def expected_rate(distances: NDArray[np.float64], rates_per_s: Sequence[float]) -> float:
    """Return the geometric mean of the rates (above 0) that configurations at these distances (n,) reached, weighted by
    how near they are (Shepard 1968): the nearest few decide."""
    weights = (_NEAREST + distances) ** -_SHARPNESS
    return float(np.exp(weights @ np.log(rates_per_s) / weights.sum()))


def surely_loses(goal: Goal, value: float, best: float) -> bool:
    """Return whether a short look at a fixed rate was so much worse than the best so far that the rest is spared."""
    sure = _SURE_MS if goal.metric.endswith("_ms") else _SURE
    return value < best * (1.0 - sure) if goal.direction == "max" else value > best * (1.0 + sure)


def _bracket(looks: Sequence[Look]) -> tuple[Look | None, Look | None]:
    """Return the highest run that held and the lowest above it that did not. A longer run outweighs shorter ones: what
    missed in it has missed from that rate up, what held in it has held."""
    longest = max(look.duration_s for look in looks)
    floor = max((each.rate_per_s for each in looks if each.held and each.duration_s == longest), default=0.0)
    missed = min(
        (each for each in looks if not each.held and (each.rate_per_s > floor or each.duration_s == longest)),
        key=lambda each: (each.rate_per_s, -each.duration_s),
        default=None,
    )
    below = [each for each in looks if each.held and (missed is None or each.rate_per_s < missed.rate_per_s)]
    return max(below, key=lambda each: (each.rate_per_s, each.duration_s), default=None), missed


def _below(missed: Look) -> float:
    """Return a rate below one that was missed: what the server answered meanwhile, a little less."""
    answered = _BACK * missed.answered_per_s
    return min(missed.rate_per_s / _MIN_STEP, max(answered, missed.rate_per_s / 2.0**2))
