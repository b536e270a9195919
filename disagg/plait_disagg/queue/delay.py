"""A varying delay, tracked as TCP tracks round trips: by its mean and mean deviation (RFC 6298, 2)."""

from __future__ import annotations

__all__ = ["Delay"]

_MEAN, _DEVIATION = 1 / 8, 1 / 4
"""Shares of the newest observation (RFC 6298, 2.3)."""

_SURPRISE = 4.0
"""An observation counts as at most so many times what was likely: one stall of the machine must not refuse a second of
requests. If the delay really grew, each observation says so again."""

_MIN_S = 1e-3
"""What is always likely, for that."""


class Delay:
    """Mean and mean deviation of a delay. Not locked: one thread records, any may read."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    @property
    def likely_s(self) -> float:
        """The mean plus one deviation, which few samples exceed; 0 before the first sample."""
        return 0.0 if self._mean_s is None else self._mean_s + self._deviation_s

    def saw(self, seconds: float) -> None:
        """Record one sample."""
        seconds = max(0.0, seconds)
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        seconds = min(seconds, _SURPRISE * max(self.likely_s, _MIN_S))
        self._deviation_s += _DEVIATION * (abs(seconds - self._mean_s) - self._deviation_s)
        self._mean_s += _MEAN * (seconds - self._mean_s)
