"""A short search for the rate at which a configuration still holds its SLO: a few runs, for trials that must be cheap.

`plait_loadtest.capacity` is the long search, with a confidence statement; a tuner measures its best candidates
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["RateResult", "search_rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RateResult:
    """The result of one run: whether it held the SLO, and its goodput."""

    rate_per_s: float
    held: bool
    goodput_per_s: float


def search_rate(
    run: Callable[[float], RateResult],
    first_per_s: float,
    *,
    runs: int = 5,
    factor: float = 2.0,
    tolerance: float = 0.1,
) -> list[RateResult]:
    """Return the runs of a search, in order: multiply or divide the rate by `factor` until one run held and another did
    not, then take the geometric mean. Ends after `runs`, or when the two rates are within `tolerance`."""
    tried: list[RateResult] = []
    rate = first_per_s
    while len(tried) < runs:
        tried.append(run(rate))
        held = max((each.rate_per_s for each in tried if each.held), default=None)
        missed = min((each.rate_per_s for each in tried if not each.held), default=None)
        if held is None:
            rate /= factor
        elif missed is None:
            rate *= factor
        elif missed / held <= 1.0 + tolerance:
            break
        else:
            rate = (held * missed) ** 0.5
    return tried
