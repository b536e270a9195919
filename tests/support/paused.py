"""A process that is stopped for certain."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_WAIT_S = 60.0


def pause(pid: int) -> None:
    """Stop a process and return once none of its threads runs. The signal alone returns earlier: a thread on another
    processor may still answer."""
    os.kill(pid, signal.SIGSTOP)
    give_up_s = time.monotonic() + _WAIT_S
    while not all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < give_up_s, f"process {pid} does not stop"
        time.sleep(0.001)


def _is_stopped(task: Path) -> bool:
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
        return True
    return state in "Tt"
