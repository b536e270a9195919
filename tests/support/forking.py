"""Processes that are forked from the test's own, and killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def forked(work: Callable[[], object]) -> int:
    """The id of a process that does this work and ends."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def killed(pid: int) -> None:
    """Its end; it was at work until then."""
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
