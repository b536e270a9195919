"""A clock for tests of modelled links: time passes only when something waits."""

from __future__ import annotations

import itertools
import os
import threading

__all__ = ["VirtualClock"]


class VirtualClock:
    """Time that passes only by waiting, which returns at once; for one process. Thread-safe."""

    _numbers = itertools.count()

    def __init__(self, now_s: float = 0.0) -> None:
        self.epoch = f"virtual {os.getpid()} {next(self._numbers)}"
        self._now_s = now_s
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def wait_until(self, at_s: float, stop: threading.Event) -> None:
        """Advance the time to `at_s` if it was earlier."""
        if not stop.is_set():
            with self._lock:
                self._now_s = max(self._now_s, at_s)

    def advance(self, by_s: float) -> None:
        """Advance the time, as work does. Raises ValueError if it would go backwards."""
        if by_s < 0:
            raise ValueError(f"a clock does not go back by {-by_s} s")
        with self._lock:
            self._now_s += by_s
