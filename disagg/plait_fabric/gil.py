"""How long the threads of a process wait for Python's lock. Imports nothing heavy: every server does it."""

from __future__ import annotations

import sys

__all__ = ["shorten_gil_interval"]

_TURN_S = 5e-4


def shorten_gil_interval() -> None:
    """Lets this process's threads wait for Python's lock for half a millisecond at most, not for 5 (Python's default).

    For processes in which an event loop and a compute thread share the lock: a lookup of 50 us releases it, and would
    have to wait for the loop to read half a megabyte before the next one. What it gains no benchmark shows yet.
    """
    sys.setswitchinterval(_TURN_S)
