"""Configurations, outcomes and trials: what cannot be is refused, and repeats become one outcome."""

from __future__ import annotations

import math

import pytest

from plait_autoconfig.errors import TunerError
from plait_autoconfig.values import FailureKind, Trial, TrialOutcome, cells_of, pooled
from support.autoconfig import failed, measured


def test_an_outcome_is_metrics_or_a_failure():
    """Neither both nor none of the two, no metric that is not a number, and no trial without a real duration."""
    for both_or_none in ({}, {"metrics": {"a": 1.0}, "failure": FailureKind.CRASH}):
        with pytest.raises(TunerError, match="either metrics or a failure"):
            TrialOutcome(**both_or_none)
    for wrong in (math.nan, math.inf):
        with pytest.raises(TunerError, match="p99_ms is"):
            TrialOutcome.measured(p99_ms=wrong)
        with pytest.raises(TunerError, match="duration_s"):
            Trial(number=0, config={"cpu": 1}, outcome=TrialOutcome.measured(a=1.0), duration_s=wrong)


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


def test_trials_by_cell():
    """Trials are grouped by configuration, whatever the order of its knobs; all-invalid cells are left out."""
    one, other = measured(0, {"a": 1, "b": 2}, rate=1.0), measured(2, {"b": 2, "a": 1}, rate=3.0)
    (cell,) = cells_of([one, failed(1, {"a": 2, "b": 2}, FailureKind.INVALID), other])
    assert cell.trials == (one, other)
    assert cell.outcome.metrics == {"rate": 2.0}
