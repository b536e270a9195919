"""One process at a time may tune a live service, counting measuring processes that outlive their parent."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plait_autoconfig.jobs.errors import JobBusy


@contextmanager
def exclusive_lock(path: Path, *, wait_s: float, tick: Callable[[], None]) -> Iterator[int]:
    """Hold a lock on a file and yield its descriptor; a process that inherits it holds the lock, too.

    Waits for a holder that may be about to end, calling `tick` meanwhile. Raises `JobBusy` after `wait_s`.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    msg = f"another process is tuning the live service of this job (it holds {path})"
                    raise JobBusy(msg) from None
            tick()
            time.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)
