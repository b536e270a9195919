"""Whether a quantity grows: a robust line through samples, and whether its rise is more than their noise. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

__all__ = ["Slope", "slope_of"]

_BLOCKS = 30
"""Samples are taken together to so many medians: neighbours are alike, and an interval would be too narrow."""

_SIGMA = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""

_NOISES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """A line's rise per hour with its 95 % interval, its value at the start, and the rise over the whole time beside
    the noise of the samples around the line."""

    per_hour: float
    low: float
    high: float
    start: float
    rise: float
    noise: float

    @property
    def grows(self) -> bool:
        """Whether it rises for sure, and by more than its noise."""
        return self.low > 0.0 and self.rise > _NOISES * self.noise


def slope_of(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit a line by Theil and Sen: the median of all pairs' slopes. Raises ValueError for fewer than three samples."""
    if len(times_s) < 3 or len(times_s) != len(values):
        raise ValueError(f"{len(values)} values at {len(times_s)} moments are no line")
    parts = min(_BLOCKS, len(times_s))
    hours = np.array([np.median(part) for part in np.array_split(np.asarray(times_s, dtype=float) / 3600.0, parts)])
    taken = np.array([np.median(part) for part in np.array_split(np.asarray(values, dtype=float), parts)])
    fit = stats.theilslopes(taken, hours, alpha=0.95)
    around = taken - (fit.intercept + fit.slope * hours)
    return Slope(
        per_hour=float(fit.slope),
        low=float(fit.low_slope),
        high=float(fit.high_slope),
        start=float(fit.intercept + fit.slope * hours[0]),
        rise=float(fit.slope * (hours[-1] - hours[0])),
        noise=float(_SIGMA * np.median(np.abs(around - np.median(around)))),
    )
