"""Processes are ended by identity, never by a number that somebody else may have by now."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from plait.server import processes
from plait.server.processes import ProcessId

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(100)"]
SIGTERM_IS = "import signal, time; signal.signal(signal.SIGTERM, {}); print('up', flush=True); time.sleep(100)"
IGNORING = [sys.executable, "-c", SIGTERM_IS.format("signal.SIG_IGN")]
STUBBORN = [sys.executable, "-c", SIGTERM_IS.format("lambda *_: None")]


@pytest.fixture
def spawn():
    started = []

    def start(command):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        process.first_line = process.stdout.readline().strip()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("command", "grace_s", "ended_by"),
    [(SLEEP, 1e9, signal.SIGTERM), (IGNORING, 1e9, signal.SIGKILL), (STUBBORN, 0.2, signal.SIGKILL)],
    ids=["obeys", "ignores", "handles"],
)
def test_serve_end_ends_what_obeys_and_kills_the_others(spawn, command, grace_s, ended_by):
    """What ignores SIGTERM at once, since there is nothing to wait for; what handles it after the grace period."""
    child = spawn(command)
    process = processes.identify(child.pid)
    assert processes.is_running(process)
    assert processes.end([process], grace_s=grace_s) == ()
    assert not processes.is_running(process)  # though nobody has waited for it
    assert child.wait() == -ended_by


def test_serve_end_leaves_a_reused_pid_alone(spawn):
    """The same pid with another start time is somebody else and survives."""
    child = spawn(SLEEP)
    now = processes.identify(child.pid)
    assert processes.end([ProcessId(now.pid, now.start_ticks - 1)], grace_s=0.1) == ()
    assert child.poll() is None


def test_serve_members_finds_descendants_without_the_variable(spawn):
    """Children are found by parentage even if they dropped their environment."""
    child = spawn(SLEEP)
    assert child.pid in {process.pid for process in processes.members("unused-id", os.getpid())}


PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; from plait.server.processes import end_with_parent;"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], preexec_fn=end_with_parent);"
    "print(child.pid, flush=True); time.sleep(100)",
]


def test_serve_a_child_is_known_by_its_name(tmp_path):
    """While it is running: not its zombie, and not a child of somebody else."""
    program = tmp_path / "own name"
    shutil.copy(shutil.which("sleep"), program)
    assert not processes.has_child("own name")
    with subprocess.Popen([program, "100"]) as child:
        assert processes.has_child("own name")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not processes.has_child("own name")


def test_serve_end_with_parent_survives_no_killed_parent(spawn):
    """A child that was started so ends when its parent is killed without a chance to stop it."""
    parent = spawn(PARENT)
    child = processes.identify(int(parent.first_line))
    assert child is not None
    parent.kill()
    assert processes.wait_until_gone([child], timeout_s=60) == []
