"""The rate that a job promises: offered again, lowered when it is missed, and held by whoever asks later."""

from __future__ import annotations

import pytest

from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.plan import Done, Step, next_step
from plait_autoconfig.jobs.promised_rate import SLO_MET, CheckedRate, is_wanted, next_rate
from plait_autoconfig.jobs.records import JobFacts, Record
from plait_autoconfig.jobs.reporting import state_of
from plait_autoconfig.values import FailureKind, TrialOutcome
from support.tune_jobs import job, record

DEFAULT, BEST = {"replicas": 1, "batch": 4}, {"replicas": 2, "batch": 4}
ALONE = {"reference": {"config": DEFAULT, "every": 0}, "budget": {"trials": 1}, "confirm": {"best": 1, "times": 1}}
INVALID = TrialOutcome.failed(FailureKind.INVALID, "the generator fell behind")


def offered(*held: bool) -> tuple[list[float], float | None]:
    """The rates that are offered, from 100 on, and the one after these runs."""
    checks: list[CheckedRate] = []
    for each in held:
        rate = next_rate(100.0, checks)
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
        ([False] * 9, [100.0 * 0.9**n for n in range(9)], None),
        ([True, True, False] * 3, [100.0] * 3 + [90.0] * 3 + [81.0] * 3, None),
    ],
)
def test_a_rate_is_offered_until_it_is_missed_or_held_three_times(held, rates, then):
    """A miss lowers it by a tenth, and the count begins anew; nine runs are enough, whatever they say."""
    assert offered(*held) == (pytest.approx(rates), then if then is None else pytest.approx(then))


RATES = {1: {"goodput_per_cost": 10.0, "goodput_per_s": 10.0}, 2: {"goodput_per_cost": 40.0, "goodput_per_s": 40.0}}
SEARCHED = [
    record(at, config, RATES[config["replicas"]], kind=kind)
    for at, (config, kind) in enumerate([
        (DEFAULT, MeasurementKind.REFERENCE), (BEST, MeasurementKind.TRIAL),
        (DEFAULT, MeasurementKind.CONFIRM), (BEST, MeasurementKind.CONFIRM),
    ])
]  # fmt: skip
"""The records of a job that has been confirmed: forty a second by the best one, ten by the other."""
HELD, MISSED, UNKNOWN = {SLO_MET: 1.0}, {SLO_MET: 0.0}, dict[str, float]()


def said(*checks: dict[str, float] | None) -> tuple[list[Record], Step]:
    """The records of a job whose checks showed this, or None where the generator spoiled one, and what comes next."""
    spec, records = job(**ALONE), list(SEARCHED)
    for each in checks:
        step = next_step(spec, records)
        assert (step.kind, step.config) == (MeasurementKind.CHECK, BEST)
        outcome = INVALID if each is None else TrialOutcome(metrics=RATES[2] | each)
        number = len(records)
        records.append(record(number, BEST, outcome=outcome, kind=step.kind, rate_per_s=step.rate_per_s))
    return records, next_step(spec, records)


@pytest.mark.parametrize(
    ("checks", "rate_per_s", "sentence", "is_over"),
    [
        ([MISSED, MISSED, HELD, HELD, HELD], 32.4, "Offered again, 32.4 were held in 3 runs of 3.", True),
        ([MISSED] * 9, None, "No rate down to 17.2 was held throughout when it was offered again.", True),
        ([MISSED, HELD], None, "Offered again, 36 were held in 1 run, too few to promise it.", False),
    ],
)
def test_what_is_recommended_is_offered_its_rate_and_the_answer_says_what_held(checks, rate_per_s, sentence, is_over):
    """The sentence tells it, also how far down it went, or that the budget left too few runs."""
    records, step = said(*checks)
    assert isinstance(step, Done) == is_over
    short = job(**ALONE | {"budget": {"trials": 1, "minutes": 1.0}})
    assert isinstance(next_step(short, records, used_s=61.0), Done)
    state = state_of(job(**ALONE), records, JobFacts(done="the time was over"))
    promise = state.recommendation.promise
    assert promise.rate_per_s == (rate_per_s and pytest.approx(rate_per_s))
    assert promise.tried == len(checks)
    assert state.recommendation.sentence.endswith(sentence)
    assert state.recommendation.rounds == 1, "a check is no measurement of the capacity"
    assert [row.reason.partition(" ")[2] for row in state.rows[-len(checks) :]] == [
        "held" if check is HELD else "missed" for check in checks
    ]


def test_checks_that_the_generator_spoiled_are_repeated_a_few_times() -> None:
    """The third one ends it, without a promise."""
    records, step = said(None, None, None)
    assert [each.claim.rate_per_s for each in records[-3:]] == [40.0] * 3
    assert isinstance(step, Done)


def test_a_check_that_does_not_say_whether_the_slo_was_met_held_nothing() -> None:
    """What is not known is not promised."""
    _, lower = said(UNKNOWN)
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
    assert not is_wanted(job(**{**ALONE, **changes}))
