"""What a job does next, from its records alone, and what a measurement is told of those before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait_autoconfig.jobs.loop import expected_per_s, to_beat
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.plan import (
    Done,
    NoReference,
    RunMeasurement,
    RunSearch,
    Wait,
    ends_first,
    next_step,
    why_stalled,
)
from plait_autoconfig.jobs.spec import Stop
from plait_autoconfig.objective import Goal, Objective
from plait_autoconfig.values import FailureKind, TrialOutcome, cells_of
from support.autoconfig import failed, measured
from support.tune_jobs import job, record

DEFAULT = {"replicas": 1, "batch": 4}
CRASH = TrialOutcome.failed(FailureKind.CRASH, "it died")
INVALID = TrialOutcome.failed(FailureKind.INVALID, "fell behind")


def good(number, config, value, **more):
    """A record of the default goal."""
    return record(number, config, {"goodput_per_cost": value}, **more)


def reference(number=0, **more):
    """A measurement of the reference."""
    return good(number, DEFAULT, 10.0, kind=MeasurementKind.REFERENCE, **more)


def trials(count):
    """Some trials of different configurations, each better than the one before."""
    cells = [cell for cell in job().space.cells() if cell != DEFAULT]
    return [good(1 + index, cells[index], 11.0 + index) for index in range(count)]


def step(spec, records, *, left_s=None):
    """The next step, with so much left of the budget."""
    return next_step(spec, records, used_s=0.0 if left_s is None else 60.0 * spec.budget.minutes - left_s)


def test_the_reference_comes_first_and_everybody_waits_for_it():
    """Nothing is tried before there is something to compare with."""
    spec = job()
    assert step(spec, []) == RunMeasurement(MeasurementKind.REFERENCE, DEFAULT)
    assert step(spec, [record(0, DEFAULT, kind=MeasurementKind.REFERENCE, running=True)]) == Wait()
    assert step(spec, [reference()]) == RunSearch()


def test_a_warm_up_precedes_the_first_reference_when_asked_for():
    """It is measured once; its result plays no role."""
    spec = job(reference={"config": DEFAULT, "warm_up": True})
    assert step(spec, []) == RunMeasurement(MeasurementKind.WARM_UP, DEFAULT)
    assert step(spec, [record(0, DEFAULT, kind=MeasurementKind.WARM_UP, running=True)]) == Wait()
    assert step(spec, [good(0, DEFAULT, 1.0, kind=MeasurementKind.WARM_UP)]) == RunMeasurement(
        MeasurementKind.REFERENCE, DEFAULT
    )


def test_a_reference_that_fails_ends_the_job_with_its_reason():
    """A broken set-up costs one measurement, not the budget."""
    found = step(job(), [record(0, DEFAULT, outcome=CRASH, kind=MeasurementKind.REFERENCE)])
    assert found == NoReference("the reference configuration could not be measured: crash: it died")


def test_an_invalid_load_test_of_the_reference_is_repeated_twice():
    """The generator may have stumbled; three times in a row it has not."""
    invalid = [record(number, DEFAULT, outcome=INVALID, kind=MeasurementKind.REFERENCE) for number in range(3)]
    assert step(job(), invalid[:2]) == RunMeasurement(MeasurementKind.REFERENCE, DEFAULT)
    assert step(job(), invalid).is_invalid


def test_the_reference_returns_after_every_few_trials():
    """`every: 3`: after the third trial since the last reference, running ones included."""
    spec = job()
    assert step(spec, [reference(), *trials(2)]) == RunSearch()
    assert step(spec, [reference(), *trials(3)]) == RunMeasurement(MeasurementKind.REFERENCE, DEFAULT)
    assert step(spec, [reference(), *trials(3), reference(4)]) == RunSearch()
    assert step(job(reference={"config": DEFAULT, "every": 0}), [reference(), *trials(5)]) == RunSearch()


def test_repeats_follow_at_once_unless_the_configuration_failed():
    """`repeats: 2` measures each proposal twice; a crash needs no second opinion, an invalid load test is none."""
    spec, cell = job(repeats=2), {"replicas": 2, "batch": 2}
    assert step(spec, [reference(), good(1, cell, 3.0)]) == RunMeasurement(MeasurementKind.TRIAL, cell)
    assert step(spec, [reference(), good(1, cell, 3.0), good(2, cell, 3.1, running=True)]) == RunSearch()
    assert step(spec, [reference(), record(1, cell, outcome=CRASH)]) == RunSearch()
    assert step(spec, [reference(), record(1, cell, outcome=INVALID)]) == RunSearch()


def test_the_budget_counts_trials_and_the_time_for_the_confirmation_is_kept_back():
    """Lost trials are free; of the minutes, what the confirmation takes is not spent on trials."""
    alone, confirm = {"config": DEFAULT, "every": 0}, {"best": 2, "times": 2}
    spec = job(reference=alone, confirm=confirm, budget={"trials": 6, "minutes": 1.0})
    lost = replace(good(6, {"replicas": 4, "batch": 1}, 0.0, running=True), lost="its worker was gone")
    assert step(spec, [reference(), *trials(5), lost]) == RunSearch()
    assert step(spec, [reference(), *trials(5)], left_s=8.5) == RunSearch()  # a trial, (1 + 2) x 2 of 1 s, the checks
    assert isinstance(step(spec, [reference(), *trials(5)], left_s=7.5), RunMeasurement)
    slow = reference(duration_s=2.0)  # the confirmation takes as long as the reference, whatever trials take
    assert isinstance(step(spec, [slow, *trials(5)], left_s=15.0), RunMeasurement)
    assert step(spec, [slow, *trials(5)], left_s=15.5) == RunSearch()
    assert isinstance(step(spec, [reference(), *trials(6)]), RunMeasurement)


def test_nothing_is_confirmed_while_a_trial_is_running():
    """It may turn out to be the best."""
    spec = job(reference={"config": DEFAULT, "every": 0})
    running = record(6, {"replicas": 4, "batch": 4}, running=True)
    assert step(spec, [reference(), *trials(5), running]) == Wait()


def test_candidates_that_fail_again_give_way_to_the_next_ones():
    """A candidate that crashes is not measured again, and the next best gets its chance, within the runs."""
    spec = job(reference={"config": DEFAULT, "every": 0}, confirm={"best": 2, "times": 2}, offered="given")
    records, order = [reference(), *trials(6)], []
    best, second = records[6].config, records[5].config
    while isinstance(found := step(spec, records), RunMeasurement):
        assert found.kind is MeasurementKind.CONFIRM
        order.append(found.config)
        shown = {"outcome": CRASH} if found.config == best else {"metrics": {"goodput_per_cost": 20.0}}
        records.append(record(len(records), found.config, kind=found.kind, **shown))
    assert order.count(best) == 1
    assert order.count(second) >= 2
    assert len(order) <= 6
    assert found == Done("the 6 trials of the budget were made")


def test_two_workers_measure_different_candidates():
    """What another one measures is not asked for; when nothing else is wanted, one waits."""
    spec = job(reference={"config": DEFAULT, "every": 0}, confirm={"best": 2, "times": 1})
    records = [reference(), *trials(5), good(6, {"replicas": 4, "batch": 4}, 99.0)]
    first = step(spec, records)
    running = [*records, record(7, first.config, kind=MeasurementKind.CONFIRM, running=True)]
    second = step(spec, running)
    assert second.config != first.config
    assert step(spec, [*running, record(8, second.config, kind=MeasurementKind.CONFIRM, running=True)]) == Wait()


def test_out_of_time_or_without_candidates_there_is_no_confirmation():
    """`best: 0` asks for none; nothing feasible leaves none; time that is up is up."""
    alone = {"reference": {"config": DEFAULT, "every": 0}}
    records = [reference(), *trials(6)]
    assert isinstance(step(job(**alone, confirm={"best": 0}), records), Done)
    assert isinstance(step(job(**alone, limits=["goodput_per_cost >= 99"]), records), Done)
    assert isinstance(step(job(**alone, budget={"trials": 6, "minutes": 1.0}), records, left_s=-1.0), Done)


def test_several_goals_confirm_the_ends_of_the_front_first():
    """The extremes, then the middle: the front is known in its whole width soonest."""
    cells = cells_of(measured(number, {"k": number}, x=float(number)) for number in range(1, 6))
    assert [cell.config["k"] for cell in ends_first(cells, "x")] == [1, 5, 3, 2, 4]
    assert ends_first(cells[:2], "x") == cells[:2]


def history(*outcomes):
    """Trials with these metrics, or None for one that crashed."""
    return [failed(n, {"k": n}) if each is None else measured(n, {"k": n}, **each) for n, each in enumerate(outcomes)]


def test_the_stop_rule_waits_for_something_feasible_and_then_for_progress():
    """Patience counts trials without an improvement worth the name."""
    objective, stop = Objective((Goal("x", "max"),)), Stop(patience=2, least_gain=0.05)
    one = {"x": 1.0}
    assert why_stalled(objective, stop, history(one, one)) == ""
    assert why_stalled(objective, stop, history(one, one, {"x": 1.04})) == (
        "the last 2 trials brought no improvement of 5 %"
    )
    assert why_stalled(objective, stop, history(one, one, {"x": 1.06})) == ""
    assert why_stalled(objective, stop, history(None, None, None, None)) == ""
    assert why_stalled(objective, Stop(patience=0), history(*[one] * 20)) == ""


def test_with_several_goals_the_front_must_move():
    """A trial that joins the front is progress, a dominated one is not."""
    objective, stop = Objective((Goal("x", "max"), Goal("y", "min"))), Stop(patience=1)
    first = {"x": 1.0, "y": 1.0}
    assert why_stalled(objective, stop, history(first, {"x": 2.0, "y": 2.0})) == ""
    assert why_stalled(objective, stop, history(first, {"x": 0.5, "y": 2.0})) != ""


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
