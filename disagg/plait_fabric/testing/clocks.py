"""A clock for tests of modelled links: time passes only when somebody waits."""

from __future__ import annotations

import itertools
import os
import threading

__all__ = ["VirtualClock"]


class VirtualClock:
    """Time that passes only by waiting, in no time at all; for one process. Thread-safe."""

    _numbers = itertools.count()

    def __init__(self, now_s: float = 0.0) -> None:
        self.epoch = f"virtual {os.getpid()} {next(self._numbers)}"
        self._now_s = now_s
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return self._now_s

    def wait_until(self, at_s: float, stop: threading.Event) -> None:
        """It is ``at_s`` now, if it was earlier."""
        if not stop.is_set():
            with self._lock:
                self._now_s = max(self._now_s, at_s)

    def advance(self, by_s: float) -> None:
        """Lets time pass, as work does. Raises ValueError if it would go backward."""
        if by_s < 0:
            raise ValueError(f"a clock does not go back by {-by_s} s")
        with self._lock:
            self._now_s += by_s
