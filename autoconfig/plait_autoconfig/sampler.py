"""Any designer as an Optuna sampler: `study.optimize` and ask/tell work, with our de-duplication and feasibility.

The study's objective returns the values of the designer's goals, in their order, and reports each limit with
`report` (or `Trial.set_constraint` under the text of the limit). A trial that raises, or ends as FAIL, is a crash,
unless its user attribute `failure` names another `FailureKind`; a pruned one has run out of time. All knobs of the
space must be suggested with exactly its distributions (`Space.distributions`), conditional ones only when active.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from optuna.trial import Trial as OptunaTrial

from plait_autoconfig.designers.base import Designer
from plait_autoconfig.errors import DesignerError, OutsideSpace, TrialFailed
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, FailureKind, Trial, TrialOutcome

FAILURE = "failure"
_FIXED = "fixed_params"  # where Optuna keeps the parameters of an enqueued trial
_logger = logging.getLogger(__name__)


def report(trial: OptunaTrial, objective: Objective, outcome: TrialOutcome) -> tuple[float, ...]:
    """Set the constraints of a trial and return the value for the objective function to return.

    A failed outcome is recorded in the trial's attributes and raised as `TrialFailed`, for Optuna to record a FAIL:
    pass `catch=(TrialFailed,)` to `study.optimize`.
    """
    if outcome.failure is not None:
        trial.set_user_attr(FAILURE, outcome.failure.value)
        raise TrialFailed(outcome.detail or outcome.failure.value)
    for name, excess in objective.excesses(outcome).items():
        trial.set_constraint(name, excess)
    return tuple(outcome.metrics[goal.metric] for goal in objective.goals)


class DesignerSampler(BaseSampler):
    """A sampler that gets its proposals from a designer and makes all of Optuna's calls to it. It also learns from
    other workers' trials of the study."""

    def __init__(self, designer: Designer, space: Space, objective: Objective) -> None:
        self._designer, self._space, self._objective = designer, space, objective
        self._distributions = space.distributions()
        self._asked: dict[int, Config] = {}
        self._reported: set[int] = set()
        self._lock = threading.Lock()  # study.optimize(n_jobs=2) shares the sampler between threads

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the whole space, from the first trial on."""
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the designer's proposal; nothing for a trial whose knobs were all enqueued by the user."""
        self._check(study)
        if self._space.includes(trial.system_attrs.get(_FIXED, {})):
            return {}
        with self._lock:
            self._catch_up(study)
            self._asked[trial.number] = config = self._designer.ask()
        return dict(config)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Raise `OutsideSpace`: only called for parameters outside the proposal, an error in the objective function."""
        if param_name not in self._space.by_name:
            raise OutsideSpace(f"{param_name} is no knob of the space; they are {', '.join(self._space.by_name)}")
        if param_distribution != (wanted := self._distributions[param_name]):
            raise OutsideSpace(f"{param_name} is suggested from {param_distribution}, but the space has {wanted}")
        raise OutsideSpace(f"{param_name} is suggested, but has no meaning in this configuration")

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Tell the designer the result of the trial, also when it failed."""
        with self._lock:
            self._asked.pop(trial.number, None)  # the user may have fixed some of the knobs, or stopped before the last
            self._designer.expect(self._asked.values())
            self._reported.add(trial.number)
            self._tell(trial, state, values)

    def _catch_up(self, study: Study) -> None:
        """Learn from finished trials that this sampler did not see: of other workers, or before a restart."""
        for trial in study.get_trials(deepcopy=False):
            if trial.state.is_finished() and trial.number not in self._reported:
                self._reported.add(trial.number)
                self._tell(trial, trial.state, trial.values)

    def _tell(self, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        outcome = self._outcome(trial, state, values)
        try:
            self._designer.tell(Trial(number=trial.number, config=trial.params, outcome=outcome))
        except OutsideSpace as error:
            _logger.warning("trial %d of the study teaches nothing: %s", trial.number, error)

    def _outcome(self, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> TrialOutcome:
        kind = trial.user_attrs.get(FAILURE)
        if kind is not None:
            return TrialOutcome.failed(FailureKind(kind))
        if state is not TrialState.COMPLETE or values is None:
            return TrialOutcome.failed(FailureKind.TIME_OUT if state is TrialState.PRUNED else FailureKind.CRASH)
        metrics = {}
        for limit in self._objective.limits:
            excess = trial.constraints.get(str(limit))
            if excess is None:
                msg = f"trial {trial.number} set no constraint {str(limit)!r}; see plait_autoconfig.sampler.report"
                raise DesignerError(msg)
            metrics[limit.metric] = limit.metric_at(excess)
        metrics.update({goal.metric: value for goal, value in zip(self._objective.goals, values, strict=True)})
        return TrialOutcome(metrics=metrics)

    def _check(self, study: Study) -> None:
        wanted = [
            StudyDirection.MINIMIZE if goal.direction == "min" else StudyDirection.MAXIMIZE
            for goal in self._objective.goals
        ]
        if list(study.directions) != wanted:
            names = [direction.name.lower() for direction in wanted]
            raise DesignerError(f"the study must have the directions {names}, those of {self._objective}")
