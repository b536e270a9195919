"""What plait's designer believes: the pooled background, and what trials make of it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from plait_autoconfig.objective import Goal, Limit, Objective
from plait_autoconfig.surrogate import posterior
from plait_autoconfig.surrogate.pooling import PastSource, margins, pool
from plait_autoconfig.surrogate.posterior import (
    Background,
    Posterior,
    TrialData,
    expected_improvement,
    expected_regret,
    infer,
    log_evidence,
    margin_background,
    matern_between,
    no_background,
    probability_above,
)
from plait_autoconfig.values import FailureKind, TrialOutcome

CELLS = np.stack(np.meshgrid(np.linspace(0, 1, 6), np.linspace(0, 1, 5), indexing="ij"), -1).reshape(-1, 2)
SURFACE = np.sin(3.0 * CELLS[:, 0]) + CELLS[:, 1] ** 2


def test_what_a_service_did_not_measure_is_filled_from_the_others():
    """Levels and spreads of services do not matter: the mean orders the cells as all of them do."""
    rng, made = np.random.default_rng(2), []
    for n in range(5):
        some = rng.permutation(len(CELLS))[:18]
        values = 5.0 * n + (1.0 + 0.2 * n) * SURFACE + 0.05 * rng.standard_normal(len(CELLS))
        made.append(PastSource(features=CELLS[some], values=values[some], context=np.zeros(0)))
    pooled = pool(made, CELLS, np.zeros(0), np.random.default_rng(0))
    assert np.corrcoef(pooled.mean, SURFACE)[0, 1] > 0.9
    assert pooled.trust > 0.7


def test_a_service_is_foreseen_by_its_features():
    """Where services differ with a feature of theirs, the mean for a new one follows that feature."""
    rng = np.random.default_rng(3)
    made = [
        PastSource(
            features=CELLS, values=sign * SURFACE + 0.05 * rng.standard_normal(len(CELLS)), context=np.array([sign])
        )
        for sign in (1.0, -1.0, 1.0, -1.0, 1.0, -1.0)
    ]
    for sign in (1.0, -1.0):
        pooled = pool(made, CELLS, np.array([sign]), np.random.default_rng(0))
        assert np.corrcoef(pooled.mean, sign * SURFACE)[0, 1] > 0.9


def feasible_after(back: Background, *cells: int) -> np.ndarray:
    """The chance of each cell to keep its limits, after these have failed."""
    ones = np.ones(len(cells))
    failed = TrialData(index=np.array(cells, np.intp), values=-ones, repeats=ones, noise=0.05)
    return probability_above(infer(back, failed, np.random.default_rng(0)), 0.0)


def test_levels_of_margins_carry_over():
    """Absolute quantities keep their level: a cell that failed everywhere is expected to fail. Where nothing is known
    four in five are expected not to, and one failure lowers its neighbours most."""
    failed = CELLS[:, 0] > 0.7
    made = [PastSource(features=CELLS, values=np.where(failed, -1.0, 1.0), context=np.zeros(0))] * 4
    chance = feasible_after(pool(made, CELLS, np.zeros(0), np.random.default_rng(0), absolute=True))
    assert chance[failed].max() < 0.2
    assert chance[~failed].min() > 0.8
    before, after = (feasible_after(margin_background(CELLS), *cells) for cells in ((), (29,)))
    assert before == pytest.approx(0.8, abs=0.05)
    assert after[29] < after[15] < after[0] < before[0]


def test_attainment_is_judged_by_what_is_missing():
    """0.97 is far from 0.99 though the numbers are close, and nothing missed is as good as can be."""
    objective = Objective(
        (Goal("goodput_per_s", "max"),), (Limit("attainment", "at_least", 0.99), Limit("p99_ms", "at_most", 100.0))
    )
    shown = [
        TrialOutcome.measured(goodput_per_s=1.0, attainment=attainment, p99_ms=p99_ms)
        for attainment, p99_ms in ((1.0, 50.0), (0.99, 50.0), (0.97, 50.0), (0.0, 50.0), (1.0, 110.0))
    ]
    found = margins(objective, [*shown, TrialOutcome.failed(FailureKind.CRASH)])
    assert found == pytest.approx([1.0, 0.0, -0.5, -99 / 101, -0.2, -1.0])


def test_evidence_is_that_of_a_gaussian():
    """The naive twin: the density of the trials under the covariance written out in full."""
    rng, seen = np.random.default_rng(1), np.array([0, 7, 19, 24], np.intp)
    values = [5.0 * n + (1.0 + 0.2 * n) * SURFACE + 0.05 * rng.standard_normal(len(CELLS)) for n in range(4)]
    made = [PastSource(features=CELLS, values=each, context=np.zeros(0)) for each in values]
    back = pool(made, CELLS, np.zeros(0), np.random.default_rng(0))
    trials = TrialData(index=seen, values=SURFACE[seen], repeats=np.ones(4), noise=0.01)
    theta = back.scales.center
    mix, smooth, own = np.exp(2.0 * theta[:3])
    rows = CELLS[trials.index] / np.exp(theta[3:])
    mean, deviations = back.mean[trials.index], back.deviations[:, trials.index]
    covariance = back.offset_sd**2 + posterior.SLOPE_SD**2 * np.outer(mean, mean)
    covariance = covariance + mix * deviations.T @ deviations / len(deviations) + smooth * matern_between(rows, rows)
    covariance += (own + trials.noise**2 + posterior.JITTER) * np.eye(4)
    density = multivariate_normal(mean, covariance).logpdf(trials.values)
    constant = 0.5 * len(mean) * np.log(2.0 * np.pi)
    assert log_evidence(back, trials, theta[None])[0] == pytest.approx(density + constant, rel=1e-6)


def test_repeats_say_more_than_one_trial():
    """Nine noisy trials of a cell leave a third of the doubt of one."""
    flat = no_background(CELLS)
    sd = []
    for repeats in (1.0, 9.0):
        trials = TrialData(index=np.arange(12), values=SURFACE[:12], repeats=np.full(12, repeats), noise=0.5)
        sd.append(infer(flat, trials, np.random.default_rng(0)).sds[0, :12].mean())
    assert sd[1] < 0.7 * sd[0]


def belief(means: list[float], sds: list[float]) -> Posterior:
    """One hypothesis about a few cells."""
    return Posterior(weights=np.ones(1), means=np.array([means]), sds=np.array([sds]), trust=0.0)


def test_expected_improvement_is_an_expectation():
    """It agrees with the average over draws."""
    known = belief([0.0, 1.0, -0.5], [0.5, 2.0, 1e-5])
    gain = expected_improvement(known, np.array([0.2]))
    drawn = known.means[0] + known.sds[0] * np.random.default_rng(0).standard_normal((400_000, 3))
    assert gain == pytest.approx(np.maximum(0.2 - drawn, 0.0).mean(0), abs=0.01)


def test_expected_regret_vanishes_when_nothing_can_be_better():
    """Certain and worse, or better but infeasible: no regret. Uncertain and feasible: some."""
    rng = np.random.default_rng(0)
    best = np.array([0.0])
    assert expected_regret(belief([0.0, 3.0], [1e-5, 1e-5]), best, np.ones(2), rng) < 1e-4
    assert expected_regret(belief([0.0, -3.0], [1e-5, 1e-5]), best, np.array([1.0, 0.0]), rng) < 1e-4
    assert expected_regret(belief([0.0, 0.0], [1e-5, 1.0]), best, np.ones(2), rng) > 0.2
