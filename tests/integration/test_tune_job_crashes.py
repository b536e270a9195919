"""Jobs whose workers are killed, or are two: nothing is lost, nothing is done twice."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from plait_autoconfig.jobs.loop import run_job
from plait_autoconfig.jobs.reporting import read_state
from plait_autoconfig.jobs.state import JobState
from plait_autoconfig.jobs.store import JobStore
from support.forking import forked, killed
from support.tune_jobs import fake_source, job, run_directly
from support.waiting import wait_for

KILLS, TRIALS, SECONDS = 5, 14, 0.03
LARGE = job(
    knobs={"replicas": {"kind": "int", "low": 1, "high": 8}, "batch": {"kind": "int", "low": 1, "high": 8}},
    constraints=[],
    budget={"trials": TRIALS},
)
"""A job that five workers die on before it ends: each ends two measurements at most, however late its death is."""


def measured_lines(folder: Path, what: str) -> list[str]:
    """The lines of the fake measurer's log that begin with a word."""
    log = folder / "measured.log"
    return [line for line in log.read_text().splitlines() if line.startswith(what)] if log.exists() else []


def finished(folder: Path) -> set[int]:
    """The measurements that are over."""
    return {record.number for record in JobStore.open(folder).records() if record.status == "finished"}


def assert_nothing_doubled(folder: Path, state: JobState) -> None:
    """No configuration was tried twice, the budget was met exactly, and what is finished ended once, in one process."""
    assert state.phase == "finished"
    tried = [row for row in state.rows if row.kind == "trial" and row.status == "finished"]
    assert len(tried) == len({tuple(sorted(row.config.items())) for row in tried}) == TRIALS
    ends = [int(line.split()[1]) for line in measured_lines(folder, "end")]
    assert len(ends) == len(set(ends))
    assert finished(folder) <= set(ends)


def test_five_kills_lose_at_most_the_running_trial(tmp_path):
    """At random moments, each after some progress: after each `kill -9` all finished trials are still there; in the end
    the job is complete, nothing is doubled."""
    rng, known = random.Random(7), set()
    for _ in range(KILLS):
        before = len(measured_lines(tmp_path, "end"))
        pid = forked(lambda: run_directly(tmp_path, LARGE, seconds=SECONDS, hangs_after=2))
        wait_for(lambda before=before: len(measured_lines(tmp_path, "end")) > before)
        time.sleep(rng.uniform(0.0, 3.0 * SECONDS))
        killed(pid)
        known |= finished(tmp_path)
    state = run_directly(tmp_path, LARGE, seconds=SECONDS)
    assert_nothing_doubled(tmp_path, state)
    assert known <= finished(tmp_path)
    unfinished = [row.status for row in state.rows if row.status != "finished"]
    assert unfinished == ["lost"] * len(unfinished)
    assert len(unfinished) <= KILLS


def test_two_workers_share_a_job(tmp_path):
    """Both measure, no configuration is tried twice, the reference is measured first and once at a time."""
    JobStore.open_or_create(tmp_path, LARGE)
    for pid in [forked(lambda: run_directly(tmp_path, LARGE, seconds=SECONDS)) for _ in range(2)]:
        assert os.waitpid(pid, 0)[1] == 0
    state = read_state(JobStore.open(tmp_path))
    assert_nothing_doubled(tmp_path, state)
    assert len({row.worker for row in state.rows}) == 2
    assert state.rows[0].kind == "reference"
    assert all(row.status == "finished" for row in state.rows)


def test_a_live_service_is_put_back_when_the_job_is_killed(tmp_path):
    """The measuring process notices that its job is gone, restores, closes and ends, in the middle of a trial."""
    store = JobStore.open_or_create(tmp_path, job(target={"live": {"guard": ["p99_ms <= 900"]}}))
    pid = forked(lambda: run_job(store, fake_source(fail={"batch=4": "hang"})))
    wait_for(lambda: measured_lines(tmp_path, "begin"))
    killed(pid)
    wait_for(lambda: measured_lines(tmp_path, "close"))
    begin, *then = (tmp_path / "measured.log").read_text().splitlines()
    assert begin.startswith("begin 0 reference")
    assert then == ["restore", "close"]
