"""When to call again who did not answer, and when a service that is away is likely to be back: after as long as it was
away before, or as its replicas take to start."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_MIN_OUTAGE_S = 1.0
"""No process starts within this time: who is found sooner is another replica, or was not away."""
_MIN_WAIT_S = 1.0
_OVERDUE = 0.2
"""Who should be back by now is expected within this share of the time since it was lost."""


class Outages:
    """Of one service, as one of its clients sees it. Thread-safe."""

    def __init__(self, *, first_guess_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with a service that was not found yet; `first_guess_s` holds until something better is known."""
        self._guess_s = first_guess_s
        self._measured = False
        self._clock = clock
        self._lost_s: float | None = clock()
        self._was_there = False
        self._lock = threading.Lock()

    def expect(self, start_s: float | None) -> None:
        """Record how long a replica took to start, for as long as no outage was seen to its end; None: not known."""
        with self._lock:
            if start_s is not None and not self._measured:
                self._guess_s = start_s

    def lost(self) -> None:
        """Record that no replica is there; only the first time counts until one is found."""
        with self._lock:
            if self._lost_s is None:
                self._lost_s = self._clock()

    def found(self) -> None:
        """Record that a replica is there."""
        with self._lock:
            away_s = 0.0 if self._lost_s is None else self._clock() - self._lost_s
            if self._was_there and away_s >= _MIN_OUTAGE_S:
                self._guess_s, self._measured = away_s, True
            self._lost_s, self._was_there = None, True

    def back_in_s(self) -> float:
        """Return after how long a request is likely to be answered: at least a second."""
        with self._lock:
            away_s = 0.0 if self._lost_s is None else self._clock() - self._lost_s
            if self._lost_s is None:
                return _MIN_WAIT_S
            return max(_MIN_WAIT_S, self._guess_s - away_s, _OVERDUE * away_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff: the pause doubles from `first_s` to `max_s`, which is what a replica that is back may wait
    until its clients learn of it."""

    first_s: float = 0.1
    max_s: float = 0.5

    def wait_s(self, failures: int, rng: random.Random | None = None) -> float:
        """Return the pause after `failures` (>= 1) in a row. With `rng`, up to half of it is subtracted at random, so
        that the clients of one dead server do not come back together."""
        wait_s = min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return wait_s if rng is None else wait_s * (1.0 - 0.5 * rng.random())
