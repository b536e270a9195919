"""A varying delay, tracked as TCP tracks round trips: by its mean and mean deviation (RFC 6298, 2)."""

from __future__ import annotations

__all__ = ["Delay"]

_MEAN, _DEVIATION = 1 / 8, 1 / 4
"""The weights of the newest observation in the mean and in the deviation (RFC 6298, 2.3)."""

_SURPRISE = 4.0
"""An observation is clamped to this multiple of the likely delay: one stall of the machine must not cause a second's
worth of requests to be refused. If the delay really has grown, every further observation raises the estimate
again."""

_MIN_S = 1e-3
"""The lower bound of the likely delay for that clamp."""


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
