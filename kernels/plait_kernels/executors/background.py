"""Threads that convert and compile. A process that ends waits for them.

Its end would cut them off inside OpenVINO's code, which aborts the process ("terminate called"). Long work asks
`is_ending` between its parts.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

_ending = threading.Event()
_started: set[threading.Thread] = set()


def start(name: str, work: Callable[[], None]) -> threading.Thread:
    """Call `work` on a thread of that name."""

    def run() -> None:
        try:
            work()
        finally:
            _started.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def is_ending() -> bool:
    """Return whether the process is about to end."""
    return _ending.is_set()


def wait() -> None:
    """Block until all of them are done."""
    for thread in list(_started):
        thread.join()


@atexit.register
def _end() -> None:
    _ending.set()
    wait()
