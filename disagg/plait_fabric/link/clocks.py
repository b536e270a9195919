"""Clocks of a modelled link. None is a wall clock, which may jump."""

from __future__ import annotations

import select
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

__all__ = ["Clock", "MonotonicClock"]

_SPIN_S = 2e-4
"""The part of a wait that is spent spinning: a sleep on Linux ends some 60 us late (50 us timer slack, prctl(2), and
the wake-up)."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Monotonic time."""

    @property
    def epoch(self) -> str:
        """Equal for two clocks whose times can be compared."""

    def now_s(self) -> float:
        """Return the current time."""

    def wait_until(self, at_s: float, stop: threading.Event) -> None:
        """Return at that time, at once if it has passed, or when `stop` is set."""


class MonotonicClock:
    """CLOCK_MONOTONIC, which all processes of a host share and which no change of the date affects."""

    def __init__(self) -> None:
        self._nothing = select.poll()
        self.epoch = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else _host()

    def now_s(self) -> float:
        """Return the seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    def wait_until(self, at_s: float, stop: threading.Event) -> None:
        """Sleep, then spin at the end."""
        left_s = at_s - time.monotonic()
        if left_s > _SPIN_S:
            stop.wait(left_s - _SPIN_S)
        while time.monotonic() < at_s and not stop.is_set():
            # Lets other threads have the interpreter in under a microsecond; `time.sleep(0)` takes 80 on some machines.
            self._nothing.poll(0)


def _host() -> str:
    return socket.gethostname()
