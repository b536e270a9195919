"""Any order of workers, failures and deaths: a job ends, keeps its budget, and does nothing twice."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from plait_autoconfig.jobs.measurer import Measured, MeasurementKind
from plait_autoconfig.jobs.plan import Done, NoReference, RunMeasurement, Wait, next_step
from plait_autoconfig.jobs.records import Claim, Record
from plait_autoconfig.values import FailureKind, TrialOutcome
from support.tune_jobs import job

KNOBS = {"replicas": {"kind": "int", "low": 1, "high": 30}}
MAX_STEPS, MAX_DEATHS = 400, 10


def outcome_for(draw, config):
    """Mostly a measurement, now and then a failure."""
    kind = draw(st.sampled_from([None, None, None, None, FailureKind.CRASH, FailureKind.INVALID]))
    if kind is not None:
        return TrialOutcome.failed(kind, "drawn")
    return TrialOutcome(metrics={"goodput_per_cost": float(draw(st.integers(1, 50)))})


def played(draw, spec, workers):
    """The records of a job that several workers play to its end; at any time one may die and take its claim along."""
    records: list[Record] = []
    ended: set[int] = set()
    cells, deaths = ({"replicas": replicas} for replicas in itertools.count(2)), 0
    for _ in range(MAX_STEPS):
        running = [record for record in records if record.status == "running"]
        step = next_step(spec, records)
        if isinstance(step, Done | NoReference):
            return records, step
        if running and (isinstance(step, Wait) or len(running) >= workers or draw(st.booleans())):
            record = draw(st.sampled_from(running))
            if deaths < MAX_DEATHS and draw(st.booleans()):
                deaths += 1
                records[record.number] = replace(record, lost="died")
            else:
                measured = Measured(outcome=outcome_for(draw, record.config), duration_s=1.0)
                records[record.number] = replace(record, measured=measured)
            assert record.number not in ended
            ended.add(record.number)
            continue
        assert not isinstance(step, Wait)
        kind, config = (
            (step.kind, step.config) if isinstance(step, RunMeasurement) else (MeasurementKind.TRIAL, next(cells))
        )
        claim = Claim(kind=kind, config=config, seed=0, worker="w", nonce="n", at_s=0.0)
        records.append(Record(number=len(records), claim=claim))
    raise AssertionError("the job does not end")


@settings(max_examples=25)
@given(data=st.data())
def test_every_history_ends_within_the_budget(data):
    """Trials are exactly the budget, confirmations at most those asked for, and no claim is left behind."""
    workers, trials = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    best, times = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2))
    spec = job(
        knobs=KNOBS,
        constraints=[],
        budget={"trials": trials},
        confirm={"best": best, "times": times},
        reference={"config": {"replicas": 1}, "every": data.draw(st.integers(0, 3))},
    )
    records, step = played(data.draw, spec, workers)
    active = [record for record in records if record.status != "lost"]
    kinds = Counter(record.kind for record in active)
    assert all(record.status == "finished" for record in active)
    if isinstance(step, NoReference):
        assert kinds[MeasurementKind.TRIAL] == 0
        return
    assert kinds[MeasurementKind.TRIAL] == trials
    tried = Counter(record.key for record in active if record.kind is MeasurementKind.TRIAL)
    assert max(tried.values()) == 1
    assert kinds[MeasurementKind.CONFIRM] <= (1 + best) * times * bool(best) + 3  # and a few whose load was invalid
    assert active[0].kind is MeasurementKind.REFERENCE
