"""What is told about a job: drift, intervals, why trials were rejected, the recommendation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait_autoconfig.jobs.answers import recommendations
from plait_autoconfig.jobs.drift import drift_factors, drift_warnings
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.reporting import state_of
from plait_autoconfig.jobs.uncertainty import Noise
from plait_autoconfig.values import FailureKind, TrialOutcome
from support.tune_jobs import job, record, run_directly

DEFAULT = {"replicas": 1, "batch": 4}
BETTER, WORSE = {"replicas": 2, "batch": 4}, {"replicas": 4, "batch": 1}
ALONE = {"reference": {"config": DEFAULT, "every": 0}, "budget": {"trials": 2}}


def reference(number, value, p99=20.0, kind=MeasurementKind.REFERENCE):
    """A measurement of the reference."""
    return record(number, DEFAULT, {"goodput_per_cost": value, "p99_ms": p99}, kind=kind)


def trial(number, config, value, p99=20.0, kind=MeasurementKind.TRIAL):
    """A measurement of another configuration."""
    return record(number, config, {"goodput_per_cost": value, "p99_ms": p99}, kind=kind)


def references(*values):
    """The reference, again and again."""
    return [reference(number, value) for number, value in enumerate(values)]


def test_a_drift_is_corrected_once_noise_does_not_explain_it():
    """A host at half its speed is seen in the fourth reference, and a metric that stayed is left alone; one difference
    shows nothing."""
    spec = job()
    factors = drift_factors(references(10.0, 10.1, 5.0, 5.1, 5.0), spec.reference)
    assert factors == {"goodput_per_cost": pytest.approx(0.5, rel=0.2)}
    assert drift_factors(references(10.0, 8.0), spec.reference) == {}
    assert drift_factors(references(10.0, 9.0, 11.0, 10.5, 9.4), spec.reference) == {}
    assert drift_factors([], spec.reference) == {}


def test_pure_noise_rarely_passes_for_a_drift():
    """Of 50 series of five references with 10 % noise, at most 5 are corrected, and the rest not at all."""
    rng = np.random.default_rng(0)
    series = [references(*(10.0 * np.exp(0.1 * rng.standard_normal(5)))) for _ in range(50)]
    assert sum(bool(drift_factors(each, job().reference)) for each in series) <= 5


def test_references_of_the_confirmation_show_drift_too():
    """They are measured last."""
    later = [reference(at, 5.0, kind=MeasurementKind.CONFIRM) for at in (3, 4)]
    assert drift_factors([*references(10.0, 10.0, 5.0), *later], job().reference)


def test_too_much_drift_is_said_aloud():
    """Beyond `most_drift` a correction is a guess."""
    records = [reference(0, 10.0), reference(1, 6.0), reference(2, 10.0)]
    (warning,) = drift_warnings(records, ("goodput_per_cost", "p99_ms"), job().reference)
    assert "goodput_per_cost of the reference changed to 0.60 times its first value" in warning


def test_a_drifting_host_is_corrected_and_both_values_are_kept(tmp_path):
    """The host slows down by 10 % with every measurement; corrected, the last trials are about what they would be."""
    spec = job(
        knobs={"replicas": {"kind": "int", "low": 1, "high": 12}},
        constraints=[],
        reference={"config": {"replicas": 4}, "every": 1, "most_drift": 99.0},
        budget={"trials": 10},
        confirm={"best": 0},
    )
    state = run_directly(tmp_path, spec, drift=0.1)
    still = run_directly(tmp_path / "still", spec)
    true = {row.config["replicas"]: row.raw.metrics["goodput_per_cost"] for row in still.rows}
    late = [row for row in state.rows[10:] if row.kind is MeasurementKind.TRIAL]
    assert len(late) >= 4
    for row in late:
        wanted = true[row.config["replicas"]]
        assert row.outcome.metrics["goodput_per_cost"] == pytest.approx(wanted, rel=0.3)
        assert row.raw.metrics["goodput_per_cost"] < 0.5 * wanted
        assert row.raw.metrics["cost_per_hour"] == row.outcome.metrics["cost_per_hour"]


def test_intervals_hold_what_they_say():
    """Of 150 ratios of means of two, the 95 % interval misses the true one at most 18 times (P = 0.001)."""
    missed = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        over, under = rng.normal(1.3, 0.13, 2), rng.normal(1.0, 0.1, 2)
        interval = Noise([over, under], seed=seed).ratio(over, under)
        missed += not interval.low <= 1.3 <= interval.high
    assert missed <= 18


def test_without_a_repeat_nothing_is_claimed_about_noise():
    """One measurement has no spread."""
    noise = Noise([[1.0], [2.0]], seed=0)
    assert noise.mean([1.0]).low is None
    assert noise.chance_above([2.0], [1.0]) is None


def test_the_recommendation_counts_fresh_measurements_only():
    """A lucky trial does not become the promise: the gain is that of the confirmation."""
    records = [reference(0, 10.0), trial(1, BETTER, 30.0), trial(2, WORSE, 5.0)]
    for rounds in range(2):
        records.append(reference(3 + 2 * rounds, 10.0 + rounds, kind=MeasurementKind.CONFIRM))
        records.append(trial(4 + 2 * rounds, BETTER, 13.0 + rounds, kind=MeasurementKind.CONFIRM))
    (made,) = recommendations(job(**ALONE), records)
    assert made.config == BETTER
    assert made.confirmed
    assert made.rounds == 2
    assert made.gain["goodput_per_cost"].value == pytest.approx(13.5 / 10.5)
    assert made.gain["goodput_per_cost"].low < 13.5 / 10.5 < made.gain["goodput_per_cost"].high
    assert made.changes == {"replicas": (1, 2)}
    assert made.sentence.startswith(
        "replicas = 2: 1.29 times as good as the reference in goodput_per_cost (95 % sure: "
    )
    assert "From 2 fresh measurements of it after the search." in made.sentence
    assert "That none of the other 2 that were tried is better by 1 %: " in made.sentence


def test_the_rate_that_was_searched_for_has_an_interval():
    """Somebody plans with it; at a given rate there is nothing to say."""

    def confirmed(number, config, rate):
        metrics = {"goodput_per_cost": 2.0 * rate, "goodput_per_s": rate, "p99_ms": 20.0}
        return record(number, config, metrics, kind=MeasurementKind.CONFIRM)

    records = [reference(0, 10.0), trial(1, BETTER, 30.0)]
    for round_number, (ours, theirs) in enumerate([(26.0, 10.0), (34.0, 11.0)]):
        records += [confirmed(2 + 2 * round_number, DEFAULT, theirs), confirmed(3 + 2 * round_number, BETTER, ours)]
    (made,) = recommendations(job(**ALONE), records)
    assert made.capacity.low < 26.0 < made.capacity.value == 30.0 < 34.0 < made.capacity.high
    assert "It answers 30 requests a second in time (95 % sure: " in made.sentence
    (given,) = recommendations(job(**ALONE, offered="given"), records)
    assert given.capacity is None
    assert "requests a second" not in given.sentence


def test_the_reference_stays_when_no_candidate_holds_up():
    """The best answer may be what runs already."""
    records = [*references(10.0, 10.1, 9.9), trial(3, BETTER, 11.0)]
    records += [reference(4, 10.0, kind=MeasurementKind.CONFIRM), trial(5, BETTER, 9.0, kind=MeasurementKind.CONFIRM)]
    (made,) = recommendations(job(**ALONE), records)
    assert made.config == DEFAULT
    assert made.changes == {}
    assert made.sentence.startswith("Keep the reference: none that was tried is likely to be better")


def test_an_unconfirmed_answer_says_so():
    """Without fresh measurements the sentence warns of the winner's luck."""
    (made,) = recommendations(job(**ALONE), [reference(0, 10.0), trial(1, BETTER, 12.0)])
    assert not made.confirmed
    assert "not measured again" in made.sentence


def test_a_reference_that_misses_a_limit_is_said():
    """Better than a default that is not allowed is less than it seems."""
    records = [reference(0, 10.0, p99=80.0), trial(1, BETTER, 12.0)]
    (made,) = recommendations(job(**ALONE, limits=["p99_ms <= 50"]), records)
    assert made.sentence.endswith("The reference itself misses p99_ms <= 50.")


def test_every_rejected_trial_has_its_reason():
    """The failure, the limit and by how much, or how much worse than the best."""
    spec = job(limits=["p99_ms <= 50"])
    failed = record(3, {"replicas": 4, "batch": 4}, outcome=TrialOutcome.failed(FailureKind.OUT_OF_MEMORY, "CUDA"))
    gone = replace(record(4, {"replicas": 3, "batch": 1}, running=True), lost="its worker was gone")
    records = [reference(0, 10.0), trial(1, BETTER, 20.0), trial(2, WORSE, 40.0, p99=60.0), failed, gone]
    records.append(trial(5, {"replicas": 1, "batch": 8}, 15.0))
    state = state_of(spec, records)
    assert [row.reason for row in state.rows] == [
        "",
        "",
        "p99_ms <= 50 missed by 20 % (60)",
        "out of memory: CUDA",
        "lost: its worker was gone",
        "goodput_per_cost is 25 % below the best",
    ]
    assert state.best.config == BETTER
    assert state.best.gain == {"goodput_per_cost": pytest.approx(2.0)}
    assert state.best_so_far == ((0, 10.0), (1, 20.0))


def test_candidates_that_miss_a_limit_when_measured_again_leave_no_answer_but_the_reason():
    """What was feasible by luck is not recommended, and the limit is named."""
    records = [reference(0, 10.0, p99=80.0), trial(1, BETTER, 20.0), trial(2, WORSE, 5.0, p99=70.0)]
    records += [
        reference(3, 10.0, p99=80.0, kind=MeasurementKind.CONFIRM),
        trial(4, BETTER, 20.0, p99=95.0, kind=MeasurementKind.CONFIRM),
    ]
    spec = job(**ALONE, limits=["p99_ms <= 50"], confirm={"best": 1, "times": 1})
    state = state_of(spec, records)
    assert (state.phase, state.answers) == ("finished", ())
    assert state.binding.startswith("measured again, none of 3 configurations is feasible: p99_ms <= 50 was missed")
