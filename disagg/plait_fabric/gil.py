"""How long the threads of a process wait for Python's GIL. Imports nothing heavy, because every server uses it."""

from __future__ import annotations

import sys

_TURN_S = 5e-4


def shorten_gil_interval() -> None:
    """Make this process's threads wait for the GIL for at most half a millisecond, not 5 ms (Python's default).

    For processes in which an event loop and a compute thread share the GIL: a lookup of 50 us releases it, and would
    have to wait for the loop to read half a megabyte before the next one. No benchmark shows a gain yet.
    """
    sys.setswitchinterval(_TURN_S)
