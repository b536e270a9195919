"""Statistics of repeated measurements: medians, percentiles, and pairwise ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSummary:
    """Median, 20th and 80th percentile of `n` values, in the values' unit, and the values by round."""

    value: float
    p20: float
    p80: float
    n: int
    rounds: tuple[float, ...] = ()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0..1) of `values` lie, linear between neighbours. Raises ValueError if
    there are none."""
    if not values:
        raise ValueError("no values")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must be 0..1, not {share}")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summarise(values: Sequence[float]) -> ValueSummary:
    """Summarise values. Raises ValueError if there are none."""
    p20, p50, p80 = (percentile(values, share) for share in (0.2, 0.5, 0.8))
    return ValueSummary(value=p50, p20=p20, p80=p80, n=len(values), rounds=tuple(values))


def pairwise_ratio(ours: Sequence[float], theirs: Sequence[float]) -> ValueSummary:
    """Summarise ours[i] / theirs[i]: round i ran both within seconds, so whatever slowed the machine slowed both.

    Raises ValueError if the lengths differ or are zero.
    """
    return summarise([our / their for our, their in zip(ours, theirs, strict=True)])
