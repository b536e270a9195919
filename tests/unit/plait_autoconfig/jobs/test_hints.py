"""What a measurement is told of those before it."""

from __future__ import annotations

import pytest

from plait_autoconfig.jobs.loop import expected_per_s, to_beat
from plait_autoconfig.jobs.measurer import MeasurementKind
from support.tune_jobs import job, record

SPEC = job()


def goodput(per_s: float) -> dict[str, float]:
    """What a trial measured."""
    return {"goodput_per_s": per_s, "goodput_per_cost": 10.0 * per_s}


def test_neighbours_say_how_much_to_expect():
    """The nearest decide, its own earlier measurements alone if there are any, and nothing without any."""
    records = [
        record(0, {"replicas": 1, "batch": 1}, goodput(10.0)),
        record(1, {"replicas": 4, "batch": 4}, goodput(40.0)),
    ]
    assert expected_per_s(SPEC, [], {"replicas": 1, "batch": 2}) == 0.0
    assert 10.0 <= expected_per_s(SPEC, records, {"replicas": 1, "batch": 2}) < 13.0
    assert 33.0 < expected_per_s(SPEC, records, {"replicas": 3, "batch": 4}) <= 40.0
    assert expected_per_s(SPEC, records, {"replicas": 4, "batch": 4}) == 40.0


def test_a_trial_is_told_what_it_has_to_beat_as_the_host_is_now():
    """The best so far; where the host has slowed down, so has what is to be beaten. Others run to their end."""
    default = {"replicas": 1, "batch": 4}
    records = [
        record(0, default, goodput(10.0), kind=MeasurementKind.REFERENCE),
        record(1, {"replicas": 2, "batch": 4}, goodput(20.0)),
    ]
    assert to_beat(SPEC, records, MeasurementKind.TRIAL) == 200.0
    shown = [10.0, 10.0, 5.0, 5.0, 5.0]
    slowed = [record(2 + at, default, goodput(each), kind=MeasurementKind.REFERENCE) for at, each in enumerate(shown)]
    assert to_beat(SPEC, [*records, *slowed], MeasurementKind.TRIAL) == pytest.approx(100.0, rel=0.2)
    assert to_beat(SPEC, records, MeasurementKind.CONFIRM) is None
    assert to_beat(SPEC, [], MeasurementKind.TRIAL) is None
    assert to_beat(job(objective="max goodput_per_s, min p99_ms"), [], MeasurementKind.TRIAL) is None
