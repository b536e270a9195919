"""The rate that a job promises: offered again, lowered when it is missed, and held by whoever asks later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.plan import Done, Outlook, RunMeasurement, next_step
from plait_autoconfig.jobs.promised_rate import SLO_MET, CheckedRate, next_rate
from plait_autoconfig.jobs.records import JobFacts, Record, config_key
from plait_autoconfig.jobs.reporting import state_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.values import FailureKind, TrialOutcome
from support.tune_jobs import job, record, run_directly

DEFAULT, BEST = {"replicas": 1, "batch": 4}, {"replicas": 2, "batch": 4}
ALONE = {"reference": {"config": DEFAULT, "every": 0}, "budget": {"trials": 1}, "confirm": {"best": 1, "times": 1}}
INVALID = TrialOutcome.failed(FailureKind.INVALID, "the generator fell behind")


def offered(*held: bool) -> tuple[list[float], float | None]:
    """The rates that are offered, from 100 on, and the one after these runs."""
    checks: list[CheckedRate] = []
    for each in held:
        rate = next_rate(100.0, checks)
        assert rate is not None
        checks.append(CheckedRate(rate, each))
    return [check.rate_per_s for check in checks], next_rate(100.0, checks)


@pytest.mark.parametrize(
    ("held", "rates", "then"),
    [
        ([], [], 100.0),
        ([True, True], [100.0, 100.0], 100.0),
        ([True] * 3, [100.0] * 3, None),
        ([True, True, False], [100.0] * 3, 90.0),
        ([False, True, True], [100.0, 90.0, 90.0], 90.0),
        ([False, False, True], [100.0, 90.0, 81.0], 81.0),
    ],
)
def test_a_rate_is_offered_until_it_is_missed_or_held_three_times(
    held: list[bool], rates: list[float], then: float | None
) -> None:
    """A miss lowers it by a tenth, and the count begins anew."""
    assert offered(*held) == (pytest.approx(rates), then if then is None else pytest.approx(then))


def test_nine_runs_are_enough() -> None:
    """Whatever they say."""
    assert offered(*[False] * 9)[1] is None
    assert offered(*[True, True, False] * 3)[1] is None


def test_nine_tenths_of_a_promise_are_held_where_those_of_a_mean_are_often_missed() -> None:
    """Searches that report the higher of two noisy capacities, as a bracket does: what a later load test finds."""
    random = np.random.default_rng(0)
    promised, meant = [], []
    for _ in range(2_000):
        found = [max(random.normal(100.0, 12.0, size=2)) for _ in range(2)]
        checks: list[CheckedRate] = []
        while (rate := next_rate(float(np.mean(found)), checks)) is not None:
            checks.append(CheckedRate(rate, bool(rate <= random.normal(100.0, 12.0))))
        later = random.normal(100.0, 12.0)
        promised.append(0.9 * checks[-1].rate_per_s <= later)
        meant.append(0.9 * float(np.mean(found)) <= later)
    assert np.mean(promised) > 0.93
    assert np.mean(meant) < 0.75


def searched(spec: JobSpec) -> list[Record]:
    """The records of a job that has been confirmed."""
    kinds = ((DEFAULT, MeasurementKind.REFERENCE), (BEST, MeasurementKind.TRIAL))
    again = ((DEFAULT, MeasurementKind.CONFIRM), (BEST, MeasurementKind.CONFIRM))
    return [record(at, config, metrics_of(config, spec), kind=kind) for at, (config, kind) in enumerate(kinds + again)]


def metrics_of(config: dict[str, int], spec: JobSpec) -> dict[str, float]:
    """Forty a second by the best one, ten by the other."""
    return {spec.goal.metrics[0]: 40.0 if config == BEST else 10.0, "goodput_per_s": 40.0 if config == BEST else 10.0}


def checked(number: int, step: RunMeasurement, outcome: TrialOutcome) -> Record:
    """A check that ended so."""
    return record(number, step.config, outcome=outcome, kind=MeasurementKind.CHECK, rate_per_s=step.rate_per_s)


def said(*held: bool) -> tuple[list[Record], object]:
    """The records of a job whose checks ended so, and what comes next."""
    spec = job(**ALONE)
    records = searched(spec)
    for each in held:
        step = next_step(spec, records, Outlook())
        assert isinstance(step, RunMeasurement)
        assert (step.kind, step.config) == (MeasurementKind.CHECK, BEST)
        metrics = {**metrics_of(BEST, spec), SLO_MET: float(each)}
        records.append(checked(len(records), step, TrialOutcome(metrics=metrics)))
    return records, next_step(spec, records, Outlook())


def test_what_is_recommended_is_offered_its_rate_and_the_answer_says_what_held() -> None:
    """Twice missed and three times held; the sentence tells it, and the job is done."""
    records, step = said(False, False, True, True, True)
    assert isinstance(step, Done)
    answer = state_of(job(**ALONE), records).recommendation
    assert answer is not None
    assert answer.promise is not None
    assert answer.promise.rate_per_s == pytest.approx(32.4)
    assert (answer.promise.runs, answer.promise.tried) == (3, 5)
    assert answer.sentence.endswith("Offered again, 32.4 were held in 3 runs of 3.")
    assert answer.rounds == 1, "a check is no measurement of the capacity"
    assert [row.reason for row in state_of(job(**ALONE), records).rows[-5:]] == [
        "40/s missed", "36/s missed", "32.4/s held", "32.4/s held", "32.4/s held"
    ]  # fmt: skip


def test_a_rate_that_never_holds_is_not_promised() -> None:
    """The answer says how far down it went."""
    records, step = said(*[False] * 9)
    assert isinstance(step, Done)
    answer = state_of(job(**ALONE), records).recommendation
    assert answer is not None
    assert answer.promise is not None
    assert answer.promise.rate_per_s is None
    assert "No rate down to 17.2 was held throughout when it was offered again." in answer.sentence


def test_checks_that_the_budget_ended_promise_nothing_yet() -> None:
    """The answer says what was held, and that it is too little."""
    spec, (records, _) = job(**ALONE), said(False, True)
    assert isinstance(next_step(spec, records, Outlook(left_s=-1.0)), Done)
    answer = state_of(spec, records, JobFacts(done="the time was over")).recommendation
    assert answer is not None
    assert answer.promise is not None
    assert answer.promise.rate_per_s is None
    assert answer.sentence.endswith("Offered again, 36 were held in 1 run, too few to promise it.")


def test_checks_that_the_generator_spoiled_are_repeated_a_few_times() -> None:
    """The third one ends it, without a promise."""
    spec = job(**ALONE)
    records = searched(spec)
    for _ in range(3):
        step = next_step(spec, records, Outlook())
        assert isinstance(step, RunMeasurement)
        assert step.rate_per_s == 40.0
        records.append(checked(len(records), step, INVALID))
    assert isinstance(next_step(spec, records, Outlook()), Done)


def test_a_check_that_does_not_say_whether_the_slo_was_met_held_nothing() -> None:
    """What is not known is not promised."""
    spec = job(**ALONE)
    records = searched(spec)
    step = next_step(spec, records, Outlook())
    assert isinstance(step, RunMeasurement)
    records.append(checked(len(records), step, TrialOutcome(metrics=metrics_of(BEST, spec))))
    lower = next_step(spec, records, Outlook())
    assert isinstance(lower, RunMeasurement)
    assert lower.rate_per_s == pytest.approx(36.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": "min p99_ms"},
        {"objective": "max goodput_per_s", "offered": "given"},
        {"confirm": {"best": 0}},
        {"objective": "max goodput_per_s, min cost_per_hour"},
    ],
)
def test_a_job_that_searches_no_capacity_or_measures_nothing_again_promises_nothing(changes: dict[str, object]) -> None:
    """It is done after the confirmation."""
    spec = job(**{**ALONE, **changes})
    values = {"goodput_per_s": 40.0, "p99_ms": 4.0, "cost_per_hour": 1.0}
    records = [
        record(at, config, {**values, "p99_ms": 9.0} if config == DEFAULT else values, kind=each.kind)
        for at, each in enumerate(searched(job(**ALONE)))
        for config in [dict(each.config)]
    ]
    assert isinstance(next_step(spec, records, Outlook()), Done)


def test_a_job_with_noise_checks_what_it_promises(tmp_path: Path) -> None:
    """With arrivals of their own, after everything else, and what its service reached in those runs."""
    state = run_directly(tmp_path, job(), noise=0.05)
    rows = [row for row in state.rows if row.kind is MeasurementKind.CHECK]
    assert state.recommendation is not None
    assert state.recommendation.promise is not None
    assert len(rows) == state.recommendation.promise.tried >= 3
    assert {config_key(row.config) for row in rows} == {config_key(state.recommendation.config)}
    assert rows == list(state.rows[-len(rows) :])
