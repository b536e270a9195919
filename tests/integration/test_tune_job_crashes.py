"""Jobs whose workers are killed, or are two: nothing is lost, nothing is done twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait_autoconfig.jobs.loop import run_job
from plait_autoconfig.jobs.reporting import read_state, state_to_json
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.jobs.store import JobStore
from support.tune_jobs import fake_source, job, run_directly
from support.waiting import wait_for

KILLS = 5
TRIALS = 14
_SECONDS = 0.03


def large_job() -> JobSpec:
    """A job that five workers can die on before it ends."""
    return job(
        knobs={"replicas": {"kind": "int", "low": 1, "high": 8}, "batch": {"kind": "int", "low": 1, "high": 8}},
        constraints=[],
        budget={"trials": TRIALS},
    )


def forked(work: Callable[[], object]) -> int:
    """The id of a process that does this work and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def measured_lines(folder: Path, what: str) -> list[str]:
    """The lines of the fake measurer's log that begin with a word."""
    log = folder / "measured.log"
    return [line for line in log.read_text().splitlines() if line.startswith(what)] if log.exists() else []


def killed_five_times(folder: Path) -> dict[str, Any]:
    """A job whose worker is killed at five random moments, each after some progress, and then runs to its end."""
    spec, rng, known = large_job(), random.Random(7), []
    for _ in range(KILLS):
        before = len(measured_lines(folder, "end"))
        pid = forked(lambda: run_directly(folder, spec, seconds=_SECONDS))
        wait_for(lambda before=before: len(measured_lines(folder, "end")) > before)
        time.sleep(rng.uniform(0.0, 3.0 * _SECONDS))
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        known.append([record.number for record in JobStore.open(folder).records() if record.status == "finished"])
    state = run_directly(folder, spec, seconds=_SECONDS)
    return {"known": known, "state": state_to_json(state), "ends": measured_lines(folder, "end")}


def two_workers(folder: Path) -> dict[str, Any]:
    """One job, two workers from its beginning to its end."""
    spec = large_job()
    JobStore.open_or_create(folder, spec)
    for pid in [forked(lambda: run_directly(folder, spec, seconds=_SECONDS)) for _ in range(2)]:
        assert os.waitpid(pid, 0)[1] == 0
    return {"state": state_to_json(read_state(JobStore.open(folder))), "ends": measured_lines(folder, "end")}


def orphaned(folder: Path) -> list[str]:
    """What a measuring process does to a live service after its job was killed in the middle of a trial."""
    spec = job(target={"live": {"guard": ["p99_ms <= 900"]}})
    store = JobStore.open_or_create(folder, spec)
    pid = forked(lambda: run_job(store, fake_source(fail={"batch=4": "hang"})))
    wait_for(lambda: measured_lines(folder, "begin"))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: measured_lines(folder, "close"))
    return (folder / "measured.log").read_text().splitlines()


@pytest.fixture(scope="module")
def happened(tmp_path_factory):
    """What this file did as a program, which imports everything once and forks each worker from there."""
    folder = tmp_path_factory.mktemp("jobs")
    done = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def trials(state):
    """The proposed configurations that were measured."""
    return [row for row in state["rows"] if row["kind"] == "trial" and row["status"] == "finished"]


def assert_nothing_doubled(state):
    """No configuration was tried twice, and the budget was met exactly."""
    keys = [tuple(sorted(row["config"].items())) for row in trials(state)]
    assert len(keys) == len(set(keys)) == TRIALS


def assert_each_end_was_stored_once(shown):
    """Every finished measurement ended once, in one process."""
    ends = [int(line.split()[1]) for line in shown["ends"]]
    finished = [row["number"] for row in shown["state"]["rows"] if row["status"] == "finished"]
    assert len(ends) == len(set(ends))
    assert set(finished) <= set(ends)


def test_five_kills_lose_at_most_the_running_trial(happened):
    """After each `kill -9` all finished trials are still there; in the end the job is complete, nothing is doubled."""
    shown = happened["killed"]
    rows = shown["state"]["rows"]
    assert shown["state"]["phase"] == "finished"
    assert_nothing_doubled(shown["state"])
    assert_each_end_was_stored_once(shown)
    finished = {row["number"] for row in rows if row["status"] == "finished"}
    assert len(shown["known"]) == KILLS
    assert all(set(known) <= finished for known in shown["known"])
    assert sum(row["status"] == "lost" for row in rows) <= KILLS
    assert [row["status"] for row in rows if row["status"] == "running"] == []


def test_two_workers_share_a_job(happened):
    """Both measure, no configuration is tried twice, the reference is measured first and once at a time."""
    shown = happened["two"]
    assert shown["state"]["phase"] == "finished"
    assert_nothing_doubled(shown["state"])
    assert_each_end_was_stored_once(shown)
    assert len({row["worker"] for row in trials(shown["state"])}) == 2
    assert shown["state"]["rows"][0]["kind"] == "reference"
    assert all(row["status"] == "finished" for row in shown["state"]["rows"])


def test_a_live_service_is_put_back_when_the_job_is_killed(happened):
    """The measuring process notices that its job is gone, restores, closes and ends, in the middle of a trial."""
    assert happened["orphaned"][0].startswith("begin 0 reference")
    assert happened["orphaned"][1:] == ["restore", "close"]


if __name__ == "__main__":
    base = Path(sys.argv[1])
    shown = {
        "killed": killed_five_times(base / "killed"),
        "two": two_workers(base / "two"),
        "orphaned": orphaned(base / "orphaned"),
    }
    sys.stdout.write(json.dumps(shown))
