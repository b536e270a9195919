"""What single designers promise beyond the conformance suite."""

from __future__ import annotations

import numpy as np
import optuna
import pytest

from plait_autoconfig.designers.base import RandomDesigner, SobolDesigner
from plait_autoconfig.designers.optuna_samplers import OptunaGpDesigner, OptunaTpeDesigner
from plait_autoconfig.knobs import IntKnob
from plait_autoconfig.objective import Goal, Objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import FailureKind, TrialOutcome
from suites.designers import OBJECTIVE, SMALL, run_trials
from support.autoconfig import GRID, measured

RATE = Objective((Goal("rate", "max"),))


@pytest.mark.parametrize("make", [RandomDesigner, SobolDesigner, OptunaTpeDesigner])
def test_seeds_differ(make):
    """Another seed searches in another order."""
    runs = [run_trials(make(SMALL, OBJECTIVE, seed=seed), 6) for seed in (1, 2)]
    assert runs[0] != runs[1]


def test_random_is_uniform():
    """Each cell comes first equally often: chi-squared with 11 degrees of freedom, false alarm 1 in 10,000 at 37.4."""
    firsts = [GRID.cells().index(RandomDesigner(GRID, RATE, seed=seed).ask()) for seed in range(600)]
    counts = np.bincount(firsts, minlength=12)
    assert ((counts - 50.0) ** 2 / 50.0).sum() < 37.4


def test_sobol_spreads_at_once():
    """Its first four cells of a line lie in all four quarters."""
    line = Space((IntKnob(name="n", low=0, high=63),))
    for seed in range(5):
        cells = run_trials(SobolDesigner(line, RATE, seed=seed), 4, lambda _: TrialOutcome.measured(rate=1.0))
        assert {cell["n"] // 16 for cell in cells} == {0, 1, 2, 3}


@pytest.fixture
def studies(monkeypatch):
    """Optuna's studies, in the order in which they are made."""
    made, create = [], optuna.create_study
    monkeypatch.setattr(optuna, "create_study", lambda **how: made.append(create(**how)) or made[-1])
    return made


@pytest.mark.parametrize("make", [OptunaTpeDesigner, OptunaGpDesigner])
def test_failures_are_constraints_to_optuna(make, studies):
    """A failed trial reaches the sampler as an infeasible one; an invalid one does not."""
    ran, crash = TrialOutcome.measured(rate=1.0), TrialOutcome.failed(FailureKind.CRASH)
    outcomes = iter([ran, crash, TrialOutcome.failed(FailureKind.INVALID), ran])
    designer = make(SMALL, RATE, seed=6)
    run_trials(designer, 4, lambda _: next(outcomes))
    designer.ask()
    told = [trial for trial in studies[-1].get_trials() if trial.state.name not in ("FAIL", "RUNNING")]
    assert [trial.constraints.get("runs", -1.0) for trial in told] == [-1.0, 1.0, -1.0]


def test_strangers_and_limits_reach_optuna(studies):
    """A trial that was not asked for is told with its values and an ordered choice's rank, a limit under its text; what
    is pending as running."""
    designer = OptunaGpDesigner(SMALL, OBJECTIVE, seed=8)
    designer.tell(measured(0, {"cpu": 3, "batch": 16}, rate_per_s=2.0, p99_ms=15.0))
    pending = designer.ask()
    designer.ask()
    told, running, *_ = studies[-1].get_trials()
    assert (told.params, told.values) == ({"cpu": 3, "batch": 2}, [-2.0])
    assert told.constraints == {"p99_ms <= 30": -0.5}
    assert running.params == {"cpu": pending["cpu"], "batch": SMALL.knobs[1].values.index(pending["batch"])}
    assert running.state.name == "RUNNING"
