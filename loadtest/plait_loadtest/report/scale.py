"""Axes: map data to pixels, and choose round numbers as labels."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps `low`..`high` of the data to `start`..`end` pixels; `log`: logarithmically (`low` above 0)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixels of a value; values outside are drawn at the edge."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Return round values inside: 1, 2, 5 times powers of ten, roughly `about` of them."""
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high, about)


def linear_ticks(low: float, high: float, about: int) -> list[float]:
    """Return multiples of a round step."""
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten; only the powers if those are many, and even steps if they are few."""
    if high < 6.0 * low:
        return linear_ticks(low, high, 5)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1.0, 2.0, 5.0) if high < 1000.0 * low else (1.0,)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def span(low: float, high: float, *, start: float, end: float, log: bool = False) -> Scale:
    """Return a scale that includes both ends and has a non-zero width."""
    if log:
        low = max(low, 1e-6)
        return Scale(low=low, high=max(high, low * 1.5), start=start, end=end, log=True)
    return Scale(low=low, high=high if high > low else low + 1.0, start=start, end=end)


def time_text(milliseconds: float) -> str:
    """Return `850 us`, `12 ms` or `1.5 s`: short, for axes and marks."""
    if milliseconds == 0:
        return "0"
    if milliseconds >= 1000.0:
        return f"{milliseconds / 1000.0:.3g} s"
    if milliseconds < 0.9995:
        return f"{milliseconds * 1000.0:.3g} µs"
    return f"{milliseconds:.3g} ms"
