"""Which candidate to measure again, and when it is clear enough who is best."""

from __future__ import annotations

import numpy as np
import pytest

from plait_autoconfig.confidence import log_loss, standing
from plait_autoconfig.objective import Objective, maximise, minimise
from plait_autoconfig.values import FailureKind, TrialOutcome


def test_everyone_is_measured_once_first():
    """And who failed is out."""
    now = standing([[0.1], [], [float("inf")]], sure=0.9, times=3)
    assert now.wanted == 1
    assert now.chances == (0.0, 1.0, 0.0)
    assert standing([[float("inf")]], sure=0.9, times=3).wanted is None


def test_it_ends_when_the_leader_is_sure():
    """A clear gap needs no more; a small one is measured until `times`; who cannot win is left alone."""
    clear = standing([[0.0], [1.0]], sure=0.9, times=5)
    assert clear.wanted is None
    assert clear.leader == 0
    assert clear.sure > 0.99
    close = standing([[0.0], [0.03], [2.0]], sure=0.95, times=5)
    assert close.wanted in (0, 1)
    assert close.chances[2] < 0.01
    assert standing([[0.0] * 5, [0.03] * 5], sure=0.999999999999, times=5).wanted is None


def test_what_it_claims_is_right_as_often_as_it_says():
    """Of 200 pairs under noise of 10 %, the winner is more than 1 % worse than the other in at most 15 %."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(200):
        truth = rng.normal(0.0, 0.1, 2)
        seen = [[float(rng.normal(each, 0.1))] for each in truth]
        while (wanted := (now := standing(seen, sure=0.9, times=20)).wanted) is not None:
            seen[wanted].append(float(rng.normal(truth[wanted], 0.1)))
        wrong += bool(truth[now.leader] - truth.min() > 0.01)
    assert wrong / 200 <= 0.15


def test_losses_are_logarithms():
    """Lower is better for both directions; a failure is infinitely bad."""
    outcome = TrialOutcome.measured(x=np.e)
    assert log_loss(Objective((minimise("x"),)), outcome) == pytest.approx(1.0)
    assert log_loss(Objective((maximise("x"),)), outcome) == pytest.approx(-1.0)
    assert log_loss(Objective((minimise("x"),)), TrialOutcome.failed(FailureKind.CRASH)) == float("inf")
