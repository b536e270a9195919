"""The measuring process: whatever it does becomes an outcome, and the next trial is measured."""

from __future__ import annotations

import subprocess

import pytest

from plait_autoconfig.errors import JobBroken, JobRefused
from plait_autoconfig.jobs.loop import JobEvent, run_job
from plait_autoconfig.jobs.measurer import MeasurementKind, MeasurementTask, MeasurerSource
from plait_autoconfig.jobs.runner import ChildRunner
from plait_autoconfig.jobs.store import JobStore
from plait_autoconfig.values import FailureKind
from support.tune_jobs import fake_source, job

GOOD = 9
FAILS = {"how=1": "hang", "how=2": "memory", "how=3": "kill", "how=4": "raise"}


def runner_for(folder, source):
    """A runner over the fake measurer."""
    return ChildRunner(source, job(), folder=folder, log=folder / "child.log")


def test_trials_that_hang_die_or_run_out_of_memory_are_outcomes_of_a_job_that_goes_on(tmp_path):
    """Each failure is of its kind and costs no more than its limit; the job ends with what works."""
    spec = job(
        knobs={"how": {"kind": "choice", "values": [1, 2, 3, 4, GOOD, 8]}},
        constraints=[],
        reference={"config": {"how": GOOD}, "every": 0},
        budget={"trials": 5},
        confirm={"best": 0},
        trial_limit_s=1.0,
    )
    events: list[JobEvent] = []
    store = JobStore.open_or_create(tmp_path, spec)
    state = run_job(store, fake_source(fail=FAILS), on_event=events.append)
    rows = {row.config["how"]: row for row in state.rows}
    assert state.phase == "finished"
    assert {how: row.outcome.failure for how, row in rows.items() if row.outcome.failure} == {
        1: FailureKind.TIME_OUT,
        2: FailureKind.OUT_OF_MEMORY,
        3: FailureKind.CRASH,
        4: FailureKind.CRASH,
    }
    assert rows[1].reason == "time out: still running after 1 s, and ended by force"
    assert 1.0 <= rows[1].duration_s < 60.0
    assert rows[2].reason.startswith("out of memory: MemoryError")
    assert "ended by SIGKILL" in rows[3].reason
    assert rows[4].reason == "crash: RuntimeError: as told"
    assert rows[8].feasible
    assert rows[GOOD].samples.cpu_cores == 1.0
    assert state.subject.service == "fake"
    assert [event.text for event in events if event.kind == "trial_progress"] == ["applying"] * 6
    assert (tmp_path / "measured.log").read_text().endswith("restore\nclose\n")


def test_what_the_measurer_refuses_is_said_before_anything_is_measured(tmp_path):
    """A knob that is not there: a sentence, no trial, no process left."""
    runner = runner_for(tmp_path, fake_source(knobs=["engine.window"]))
    with pytest.raises(JobRefused, match=r"there is no knob engine.replicas; there are engine.window"):
        runner.check(lambda: None)
    log = tmp_path / "measured.log"  # the process may be ended before it writes its parting line
    assert not log.exists() or "begin" not in log.read_text()


@pytest.mark.parametrize(
    ("source", "changes", "said"),
    [
        (MeasurerSource(factory="fakes.measurer:nothing"), {}, "AttributeError: .*nothing.*"),
        (fake_source(), {"start_limit_s": 0.001}, "still running after 0.001 s, and ended by force"),
    ],
)
def test_a_measurer_that_can_not_be_made_or_in_time_is_no_trial(tmp_path, source, changes, said):
    """It breaks the job, with the error or the limit and where to read more; there is nothing left to end."""
    runner = ChildRunner(source, job(**changes), folder=tmp_path, log=tmp_path / "child.log")
    with pytest.raises(JobBroken, match=rf"could not be started: {said} \(see .*child.log\)"):
        runner.check(lambda: None)


def test_stopping_ends_the_process_in_good_order(tmp_path, monkeypatch):
    """What `tick` raises ends the trial, though the measurer has more to say all the time; it restores and closes, and
    its process is gone."""
    processes, start = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **how: processes.append(start(*args, **how)) or processes[-1]
    )
    runner, seen = runner_for(tmp_path, fake_source(seconds=60.0)), []
    runner.check(lambda: None)

    def tick():
        if seen:
            raise KeyboardInterrupt

    task = MeasurementTask(
        number=0, kind=MeasurementKind.TRIAL, config={"how": GOOD}, seed=0, limit_s=60.0, folder=tmp_path
    )
    with pytest.raises(KeyboardInterrupt):
        runner.measure(task, seen.append, tick)
    assert len(seen) < 10  # of twenty a second, while a tick comes every fifth of one
    assert (tmp_path / "measured.log").read_text().splitlines()[1:] == ["restore", "close"]
    (process,) = processes
    assert process.poll() is not None
