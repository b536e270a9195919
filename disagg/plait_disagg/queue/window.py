"""How many batches a CN has in flight to one HN. Pure.

Many CNs that send to one HN build up a queue there, which costs every one of them time and gains none of them
anything. So a window grows by one per round of answers while batches hardly wait at the HN, and shrinks by a factor
when they do (additive increase, multiplicative decrease: Chiu and Jain 1989). Prism does the same with the
congestion marks of its network cards (NSDI'25, 4.3); here the mark is the waiting time that the HN reports.

Nor does the window grow beyond what keeps the slower of the two sides busy: the round trip, less the waiting, divided
by a batch's time there. More batches in flight would only be smaller ones, and each costs as much to make and to send
as a larger one.
"""

from __future__ import annotations

from typing import Final

_TARGET: Final = 1.5
"""How long batches may wait at the HN, as a multiple of their compute time. One batch is always on its way to keep
the HN busy; lined up behind others it waits for about one computation."""

_MIN_S: Final = 0.0005
"""Shorter waits are due to the operating system's scheduler."""

_SHRINK: Final = 0.7
"""The factor by which the window shrinks, as in CUBIC (RFC 9438, 4.6)."""

_BEGIN: Final = 4.0
"""The initial window: one batch being computed, one waiting, and one in transit in each direction."""


_WORTH_S: Final = 1.5e-3
"""From which time of a batch, here and away, both sides compute at once: below, two batches cost more to make than the
overlap gains (`order.py` splits what waits by the same measure)."""

_MEMORY: Final = 8
"""Over about how many batches times are averaged."""


class Window:
    """The window of one channel. Not locked: one thread records answers, any may read `size`."""

    def __init__(self, *, max_size: int, adapts: bool = True) -> None:
        self.max_size = max_size
        self.adapts = adapts
        self._size = min(_BEGIN, float(max_size))
        self._ignored = 0  # answers to what was sent before the last decrease
        self._made_s = self._dense_s = self._away_s = 0.0

    @property
    def size(self) -> int:
        """Batches that may be open at once; at least 1."""
        return min(int(self._size), self._useful, self.max_size) if self.adapts else self.max_size

    @property
    def _useful(self) -> int:
        slower_s = max(self._made_s, self._dense_s)
        if not slower_s:
            return self.max_size
        min_size = 2 if min(self._made_s, self._away_s) >= _WORTH_S else 1
        return max(min_size, 1 + int(self._away_s / slower_s))

    def answered(self, *, made_s: float, away_s: float, queued_s: float, dense_s: float, open_now: int) -> None:
        """Record the answer to a batch: how long it took to make and how long it was away, of which it waited and was
        computed at the HN, with `open_now` batches in flight.

        A window that is not used does not grow.
        """
        weight = 1.0 / _MEMORY if self._away_s else 1.0
        self._made_s += weight * (made_s - self._made_s)
        self._dense_s += weight * (dense_s - self._dense_s)
        self._away_s += weight * (max(0.0, away_s - queued_s) - self._away_s)
        if self._ignored:
            self._ignored -= 1
            return
        if queued_s > max(_MIN_S, _TARGET * dense_s):
            self._ignored = self.size - 1
            self._size = max(1.0, self._size * _SHRINK)
        elif open_now >= self.size:
            self._size = min(float(self.max_size), self._size + 1.0 / self._size)
