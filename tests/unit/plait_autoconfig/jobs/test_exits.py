"""Why a measuring process is gone, from the signs that there are."""

from __future__ import annotations

import signal

import pytest

from plait_autoconfig.jobs.runner import count_oom_kills, outcome_of_exit
from plait_autoconfig.values import FailureKind


@pytest.mark.parametrize(
    ("code", "lines", "kills", "kind", "said"),
    [
        (-signal.SIGKILL, "", 1, FailureKind.OUT_OF_MEMORY, "killed by the kernel, which ran out of memory"),
        (-signal.SIGKILL, "", 0, FailureKind.CRASH, "ended by SIGKILL"),
        (-signal.SIGABRT, "terminate: std::bad_alloc", 0, FailureKind.OUT_OF_MEMORY, "std::bad_alloc"),
        (1, "OSError: [Errno 12] Cannot allocate memory", 0, FailureKind.OUT_OF_MEMORY, "Errno 12"),
        (1, "ValueError: the memory format is wrong", 0, FailureKind.CRASH, "ended with code 1: ValueError"),
        (-signal.SIGSEGV, "loading", 3, FailureKind.CRASH, "ended by SIGSEGV: loading"),
        (3, "", 0, FailureKind.CRASH, "ended with code 3"),
        (-77, "", 0, FailureKind.CRASH, "signal 77"),
    ],
)
def test_an_exit_is_out_of_memory_only_with_a_sign_of_it(code, lines, kills, kind, said):
    """A SIGKILL alone proves nothing: the kernel must have counted one, or the process have said so, in the words of
    Python, C++, PyTorch or CUDA."""
    outcome = outcome_of_exit(code, last_lines=lines, oom_kills=kills)
    assert outcome.failure is kind
    assert said in outcome.detail


def test_the_kernels_counter_is_read_where_there_is_one(tmp_path):
    """Of the machine or of the container; without either it is 0."""
    vmstat, events = tmp_path / "vmstat", tmp_path / "memory.events"
    assert count_oom_kills(vmstat=vmstat, memory_events=events) == 0
    vmstat.write_text("nr_free_pages 12\noom_kill 2\n")
    events.write_text("oom 9\noom_kill 5\n")
    assert count_oom_kills(vmstat=vmstat, memory_events=events) == 5
