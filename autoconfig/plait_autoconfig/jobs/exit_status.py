"""Why a measuring process ended: out of memory, or a crash. The kernel gives no reason, so it is inferred."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from plait_autoconfig.values import FailureKind, TrialOutcome

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|bad_alloc|Cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)


def mentions_out_of_memory(text: str) -> bool:
    """Return whether an error's text is one that Python, C++, PyTorch or CUDA gives for running out of memory."""
    return _OUT_OF_MEMORY.search(text) is not None


def outcome_of_exit(return_code: int, *, last_lines: str, oom_kills: int) -> TrialOutcome:
    """Return the outcome of a trial whose process ended. `return_code`: negative for a signal, as in `subprocess`.

    `oom_kills`: how often the kernel killed for memory on this machine during the trial (`count_oom_kills`).
    """
    said = f": {last_lines}" if last_lines else ""
    if return_code == -signal.SIGKILL and oom_kills > 0:
        detail = f"killed by the kernel, which ran out of memory{said}"
        return TrialOutcome.failed(FailureKind.OUT_OF_MEMORY, detail)
    if mentions_out_of_memory(last_lines):
        return TrialOutcome.failed(FailureKind.OUT_OF_MEMORY, last_lines)
    if return_code < 0:
        name = signal.Signals(-return_code).name if -return_code in set(signal.Signals) else f"signal {-return_code}"
        return TrialOutcome.failed(FailureKind.CRASH, f"the measuring process was ended by {name}{said}")
    return TrialOutcome.failed(FailureKind.CRASH, f"the measuring process ended with code {return_code}{said}")


def count_oom_kills(
    *, vmstat: Path = Path("/proc/vmstat"), memory_events: Path = Path("/sys/fs/cgroup/memory.events")
) -> int:
    """Return how many processes the kernel has killed for memory since boot; 0 where it does not report that.

    `vmstat` is the machine's, `memory_events` a container's.
    """
    return max(_counter(vmstat, "oom_kill"), _counter(memory_events, "oom_kill"))


def _counter(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), 0)
