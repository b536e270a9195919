"""How long a replica took to start. The first module of ours that a replica imports, with its class."""

from __future__ import annotations

import time

__all__ = ["seconds_to_start"]

_PROCESS_S = 2.0
"""Until Python runs our first line: Serve notices the loss, Ray starts a process and imports itself."""
_imported_s = time.monotonic()


def seconds_to_start() -> float:
    """Return how long it took from the loss of a predecessor to this call; call it when the replica is ready."""
    return _PROCESS_S + time.monotonic() - _imported_s
