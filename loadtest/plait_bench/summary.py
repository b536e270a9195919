"""Percentiles of repeated measurements. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0..1) of `values` lie, linear between neighbours. Raises ValueError if
    there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:  # of two that are infinite nothing can be subtracted
        return ordered[low]
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
