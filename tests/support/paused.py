"""A process that is stopped for certain."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.waiting import wait_for


def pause(pid: int) -> None:
    """Stop a process and return once none of its threads runs. The signal alone returns earlier: a thread on another
    processor may still answer."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()))


def is_stopped(task: Path) -> bool:
    """Whether a thread, or a process, by its folder in /proc is stopped, or has ended."""
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
        return True
    return state in "Tt"
