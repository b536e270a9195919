"""A designer inside an Optuna study: enqueued trials, other workers, failures, and mistakes in the objective."""

from __future__ import annotations

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState

from plait_autoconfig.designers.base import RandomDesigner
from plait_autoconfig.errors import DesignerError, OutsideSpace, TrialFailed
from plait_autoconfig.objective import Goal, Limit, Objective
from plait_autoconfig.sampler import DesignerSampler, report
from plait_autoconfig.values import FailureKind, TrialOutcome
from suites.designers import CONDITIONAL, OBJECTIVE, SMALL

RATE = Objective((Goal("rate_per_s", "max"),))
optuna.logging.set_verbosity(optuna.logging.ERROR)


def begin(objective: Objective = RATE, space=SMALL, storage: BaseStorage | None = None):
    """A designer and a study that asks it; another worker of the study that is in `storage` already."""
    designer = RandomDesigner(space, objective, seed=1)
    study = optuna.create_study(
        storage=storage,
        study_name="demo",
        load_if_exists=True,
        directions=["maximize"] + ["minimize"] * (len(objective.goals) - 1),
        sampler=DesignerSampler(designer, space, objective),
    )
    return designer, study


def ask(study: optuna.Study) -> optuna.Trial:
    """A trial whose knobs are all suggested."""
    return study.ask(SMALL.distributions())


def test_every_ending_is_told():
    """Values, FAIL, PRUNED and a named failure each become their kind of outcome."""
    designer, study = begin()
    study.tell(ask(study), 2.5)
    study.tell(ask(study), state=TrialState.FAIL)
    study.tell(ask(study), state=TrialState.PRUNED)
    trial = ask(study)
    with pytest.raises(TrialFailed, match="at once"):
        report(trial, RATE, TrialOutcome.failed(FailureKind.REFUSED_START, "at once"))
    study.tell(trial, state=TrialState.FAIL)
    outcomes = [trial.outcome for trial in designer.trials]
    assert outcomes[0] == TrialOutcome.measured(rate_per_s=2.5)
    assert [outcome.failure for outcome in outcomes[1:]] == ["crash", "time_out", "refused_start"]


def test_limits_and_goals_come_back_as_metrics():
    """What was reported is what the designer hears, several goals and a limit on one of them included."""
    objective = Objective(
        (Goal("rate_per_s", "max"), Goal("cost", "min")),
        (Limit("p99_ms", "at_most", 30.0), Limit("cost", "at_most", 3.0)),
    )
    designer, study = begin(objective)
    trial = ask(study)
    outcome = TrialOutcome.measured(rate_per_s=2.0, cost=4.0, p99_ms=45.0)
    study.tell(trial, report(trial, objective, outcome))
    assert designer.trials[0].outcome.metrics == pytest.approx(outcome.metrics)
    assert study.trials[0].constraints == pytest.approx({"p99_ms <= 30": 0.5, "cost <= 3": 1 / 3})


@pytest.mark.parametrize("fixed", [{"cpu": 4, "batch": 8}, {"cpu": 4}])
def test_an_enqueued_trial_is_learned_from_and_takes_no_cell_away(fixed):
    """When the user fixed all knobs nothing is asked; when some, the proposal that was not measured stays open."""
    designer, study = begin()
    study.enqueue_trial(fixed)
    trial = ask(study)
    assert trial.params.items() >= fixed.items()
    study.tell(trial, 1.0)
    assert designer.pending() == ()
    assert [told.config for told in designer.trials] == [trial.params]


def test_other_workers_are_heard():
    """A second worker, or a restarted one, learns from what is in the study already."""
    storage = InMemoryStorage()
    _, study = begin(storage=storage)
    for _ in range(5):
        study.tell(ask(study), 1.0)
    running = ask(study)
    designer, second = begin(storage=storage)
    trial = ask(second)
    assert len(designer.trials) == 5
    assert SMALL.key(trial.params) not in {SMALL.key(told.config) for told in designer.trials}
    study.tell(running, 1.0)
    second.tell(trial, 1.0)
    ask(second)
    assert sorted(told.number for told in designer.trials) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("suggest", "said"),
    [
        (lambda trial: trial.suggest_int("cpus", 1, 4), "cpus is no knob of the space"),
        (lambda trial: trial.suggest_float("share", 0.25, 0.5), "share is suggested from .*0.5.*, but .* has .*1.0"),
        (lambda trial: trial.suggest_float("share", 0.25, 1.0, step=0.25), "share is suggested, but has no meaning"),
    ],
)
def test_suggestions_from_elsewhere_are_named(suggest, said):
    """An objective function that asks for other knobs or ranges than the space has, or for an inactive knob, is told
    so: it would get a value that nobody chose."""
    _, study = begin(OBJECTIVE, CONDITIONAL)
    study.enqueue_trial({"device": "cpu", "cpu": 1, "batch": 4})
    with pytest.raises(OutsideSpace, match=said):
        suggest(study.ask())


def test_a_study_of_another_objective_is_refused():
    """Directions and limits must be those of the objective; the message says how."""
    _, study = begin(Objective((Goal("cost", "min"),)))
    with pytest.raises(DesignerError, match=r"must have the directions \['minimize'\], those of min cost"):
        ask(study)
    _, study = begin(OBJECTIVE)
    with pytest.raises(DesignerError, match="set no constraint 'p99_ms <= 30'"):
        study.tell(ask(study), 1.0)
