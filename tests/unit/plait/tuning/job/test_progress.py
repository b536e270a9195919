"""What people see of a job while it runs: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from plait.tuning.job.local_run import headline, shown, time_breakdown
from plait_autoconfig.jobs.loop import JobEvent
from plait_autoconfig.jobs.measurer import Measured, MeasurementKind
from plait_autoconfig.jobs.records import Record
from plait_autoconfig.jobs.reporting import state_of
from plait_autoconfig.jobs.state import JobState
from plait_autoconfig.values import TrialOutcome
from support.tune_jobs import job, record


def state(*records: Record) -> JobState:
    """Of a job of three trials in ten minutes."""
    return state_of(job(budget={"trials": 3, "minutes": 10}), records)


DEFAULT, OTHER = {"replicas": 1, "batch": 4}, {"replicas": 2, "batch": 8}
REFERENCE = record(0, DEFAULT, {"goodput_per_cost": 100.0}, kind=MeasurementKind.REFERENCE, duration_s=2.0)
TRIAL = record(1, OTHER, {"goodput_per_cost": 150.0}, duration_s=2.0)
EVENTS = (
    JobEvent(kind="started", text="started"),
    JobEvent(kind="trial_progress", text="load, 1 of 2 s", number=1),
    JobEvent(kind="trial_finished", text="done", number=1),
    JobEvent(kind="trial_lost", text="its worker was gone", number=2),
    JobEvent(kind="note", text="the host drifts"),
)


class Terminal(io.StringIO):
    """Says that somebody watches."""

    def isatty(self) -> bool:
        """They do."""
        return True


def test_the_headline_has_the_best_and_what_is_left() -> None:
    """The gain is over the default; time is told as on a clock."""
    assert headline(state(REFERENCE, TRIAL)) == "best 150 (1.50 times the default), 1 of 3 trials, 9:56 left"
    assert headline(state()).startswith("nothing feasible yet, 0 of 3 trials")


def test_where_the_time_went() -> None:
    """Of one run of the job: what others measured before, or at the same time, is none of its own."""
    loaded = replace(TRIAL, measured=replace(TRIAL.measured, load_s=1.5))
    before, after = state(REFERENCE), state(REFERENCE, loaded)
    assert time_breakdown(before.remaining, after.remaining, 3.0) == (
        "took 3.0 s: load tests 1.5 s, the rest of the measurements 0.5 s, start, end and in between 1.0 s "
        "(50.0% was not load)"
    )
    assert time_breakdown(before.remaining, after.remaining, 1.0) == "took 1.0 s"
    assert time_breakdown(before.remaining, state(REFERENCE, TRIAL).remaining, 3.0) == "took 3.0 s"


def test_jobs_of_earlier_versions_do_not_say_what_was_load() -> None:
    """They can be gone on with."""
    measured = Measured(outcome=TrialOutcome.measured(goodput_per_cost=1.0), duration_s=2.0, load_s=1.5)
    documents = TypeAdapter(Measured)
    raw = documents.dump_python(measured, mode="json")
    assert documents.validate_python(raw) == measured
    del raw["load_s"]
    raw["samples"]["gpu_share"] = 0.0  # a sample that was never measured
    assert documents.validate_python(raw) == replace(measured, load_s=0.0)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_what_happens_stays_readable(stream: io.StringIO) -> None:
    """Every measurement and every note is a line; what goes on inside a trial is shown on a terminal only."""
    with shown(stream, lambda: state(REFERENCE, TRIAL)) as show:
        for event in EVENTS:
            show(event)
    text = stream.getvalue()
    assert "1 trial" in text
    assert "replicas=2 batch=8" in text
    assert "2 lost: its worker was gone" in text
    assert "the host drifts" in text
    assert "best 150" in text
    assert ("load, 1 of 2 s" in text) <= stream.isatty()
