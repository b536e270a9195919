"""Configurations, outcomes and trials: what cannot be is refused, and repeats become one outcome."""

from __future__ import annotations

import math

import pytest

from plait_autoconfig.errors import TunerError
from plait_autoconfig.values import FailureKind, Trial, TrialOutcome, cells_of, pooled
from support.autoconfig import failed, measured


def test_an_outcome_is_metrics_or_a_failure():
    """Neither both nor none of the two, and no metric that is not a number."""
    with pytest.raises(TunerError, match="either metrics or a failure"):
        TrialOutcome()
    with pytest.raises(TunerError, match="either metrics or a failure"):
        TrialOutcome(metrics={"a": 1.0}, failure=FailureKind.CRASH)
    for wrong in (math.nan, math.inf):
        with pytest.raises(TunerError, match="p99_ms is"):
            TrialOutcome.measured(p99_ms=wrong)


def test_a_trial_has_a_real_duration():
    """A negative or endless duration is refused."""
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(TunerError, match="duration_s"):
            Trial(number=0, config={"cpu": 1}, outcome=TrialOutcome.measured(a=1.0), duration_s=wrong)


def test_values_do_not_follow_their_source():
    """Changing the mapping that a trial was made from does not change the trial."""
    config, metrics = {"cpu": 1}, {"rate": 1.0}
    trial = Trial(number=0, config=config, outcome=TrialOutcome(metrics=metrics))
    config["cpu"], metrics["rate"] = 2, 2.0
    assert (trial.config, trial.outcome.metrics) == ({"cpu": 1}, {"rate": 1.0})


def test_repeats_are_averaged():
    """The mean of the metrics that all repeats have; invalid ones do not count."""
    outcomes = [
        TrialOutcome.measured(a=1.0, b=5.0),
        TrialOutcome.failed(FailureKind.INVALID),
        TrialOutcome.measured(a=3.0),
    ]
    assert pooled(outcomes) == TrialOutcome.measured(a=2.0)
    assert pooled([TrialOutcome.failed(FailureKind.INVALID)]) is None
    assert pooled([]) is None
    with pytest.raises(TunerError, match="no metric in common"):
        pooled([TrialOutcome.measured(a=1.0), TrialOutcome.measured(b=1.0)])


def test_one_failure_among_repeats_decides():
    """A configuration that ran out of memory once is not one to recommend."""
    bad = TrialOutcome.failed(FailureKind.OUT_OF_MEMORY)
    assert pooled([TrialOutcome.measured(a=1.0), bad, TrialOutcome.measured(a=1.0)]) == bad


def test_trials_by_cell():
    """Trials are grouped by configuration, whatever the order of its knobs; all-invalid cells are left out."""
    trials = [
        measured(0, {"a": 1, "b": 2}, rate=1.0),
        failed(1, {"a": 2, "b": 2}, FailureKind.INVALID),
        measured(2, {"b": 2, "a": 1}, rate=3.0),
        failed(3, {"a": 3, "b": 2}),
    ]
    cells = cells_of(trials)
    assert [cell.config["a"] for cell in cells] == [1, 3]
    assert cells[0].outcome.metrics == {"rate": 2.0}
    assert [trial.number for trial in cells[0].trials] == [0, 2]
