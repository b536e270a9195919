"""Jobs whose workers are killed, or are two: nothing is lost, nothing is done twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.tune_killer import KILLS, TRIALS

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "tune_killer.py"


@pytest.fixture(scope="module")
def happened(tmp_path_factory):
    """What `support.tune_killer` did."""
    folder = tmp_path_factory.mktemp("jobs")
    done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True, timeout=200, check=False)
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
    ends = [int(line.split()[0]) for line in shown["ends"]]
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
