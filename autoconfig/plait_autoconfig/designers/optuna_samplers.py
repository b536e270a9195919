"""Optuna's TPE and GP samplers as designers: the alternatives that users would otherwise run, given their best chance.

Each proposal is that of a study made of what was told so far: how a failure counts depends on all other trials. Both
see unmodified losses, the limits as constraints, pending trials as running, and conditional knobs as ordinary ones.
Optuna ignores trials that end as FAIL, so it would propose the same corner again; therefore a failed configuration
counts as one that violates every limit: a pruned trial without a value for TPE, and a trial with the worst loss seen
for the GP, which needs a value. Invalid measurements are left out. Neither sampler knows which cells were tried or
which constraints hold between knobs: a suggestion that is not an open cell is drawn again, and after `_max_asks` draws
replaced by the nearest open cell. Optuna has no ordered categories: to a category of the values 1, 2, 4 and 8 all are
equally far apart. So an ordered choice goes to Optuna as an integer, its rank, which is how its samplers learn from
neighbours.

The defaults are those of Optuna's authors: ten random trials come first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from plait_autoconfig.designers.base import Designer
from plait_autoconfig.knobs import ChoiceKnob, Knob
from plait_autoconfig.objective import Objective
from plait_autoconfig.optuna_forms import distribution_of, quiet
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, Value

_START_UP = 10
"""The random trials at the start."""

_RUNS = "runs"
"""The name of the constraint when the objective has no limits: 1 for a failed trial, -1 for one that ran."""


class OptunaDesigner(Designer):
    """Optuna's proposals as a designer. All calls to Optuna are made here; subclasses choose the sampler."""

    _max_asks: ClassVar[int]

    def __init__(self, space: Space, objective: Objective, **given: Any) -> None:
        super().__init__(space, objective, **given)
        self._distributions = {knob.name: _distribution(knob) for knob in space.knobs}

    @abstractmethod
    def _sampler(self, seed: int) -> BaseSampler:
        """Return the sampler, with its own defaults."""

    @abstractmethod
    def _failed(self, losses: Sequence[Sequence[float]]) -> dict[str, Any]:
        """Return how a failed trial ended, to the sampler. `losses`: of all that ran."""

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        still_open, study = set(open_cells.tolist()), self._study()
        for _ in range(self._max_asks if self.space.exhaustive else 1):
            asked = study.ask(self._distributions)
            suggested = self._active(asked.params)
            index = self.index_of(suggested)
            if index is not None and index in still_open:
                return index
            study.tell(asked, state=TrialState.FAIL)
        return self.nearest(suggested, open_cells)

    def _active(self, params: dict[str, Any]) -> Config:
        """Return the configuration that a suggestion stands for, without the knobs that are inactive in it."""
        given = {
            knob.name: knob.value_at(params[knob.name]) if _ranked(knob) else params[knob.name]
            for knob in self.space.knobs
        }
        return self.space.check(given, constrained=False)

    def _study(self) -> optuna.Study:
        with quiet():
            study = optuna.create_study(
                directions=["minimize"] * len(self.objective.goals),
                sampler=self._sampler(int(self.rng.integers(2**31))),
            )
        study.add_trials(self._told())
        study.add_trials(self._trial(self.cells[index], state=TrialState.RUNNING) for index in self.pending())
        return study

    def _told(self) -> Iterator[FrozenTrial]:
        """Yield the trials that say something. Failures violate every limit by the most seen in any trial."""
        valid = [trial for trial in self.trials if not trial.outcome.invalid]
        losses = [each for trial in valid if (each := self.objective.losses(trial.outcome)) is not None]
        excesses = [self.objective.excesses(trial.outcome) for trial in valid if trial.outcome.failure is None]
        beyond = {name: max([1.0, *(each[name] for each in excesses)]) for name in map(str, self.objective.limits)}
        within: dict[str, float] = {}
        if not beyond and len(losses) < len(valid):
            beyond, within = {_RUNS: 1.0}, {_RUNS: -1.0}
        for trial in valid:
            if trial.outcome.failure is None:
                kept = self.objective.excesses(trial.outcome) or within
                yield self._trial(trial.config, values=self.objective.losses(trial.outcome), constraints=kept)
            else:
                yield self._trial(trial.config, constraints=beyond, **self._failed(losses))

    def _trial(self, config: Config, **ended: Any) -> FrozenTrial:
        """Return a trial as the sampler sees it, for which an inactive knob has some value."""
        params = {knob.name: _shown(knob, config.get(knob.name, knob.draw(0.5))) for knob in self.space.knobs}
        return create_trial(params=params, distributions=self._distributions, **ended)


class OptunaTpeDesigner(OptunaDesigner):
    """Tree-structured Parzen estimator with the defaults of Optuna 5 (multivariate, constant liar)."""

    _max_asks: ClassVar[int] = 16

    def _sampler(self, seed: int) -> BaseSampler:
        return TPESampler(seed=seed, n_startup_trials=_START_UP)

    def _failed(self, losses: Sequence[Sequence[float]]) -> dict[str, Any]:  # noqa: ARG002  # the GP asks
        return {"state": TrialState.PRUNED}


class OptunaGpDesigner(OptunaDesigner):
    """Gaussian process with logarithmic (constrained) expected improvement and Optuna's defaults."""

    _max_asks: ClassVar[int] = 2  # it would mostly suggest the same cell again, at the price of a fit

    def _sampler(self, seed: int) -> BaseSampler:
        return GPSampler(seed=seed, n_startup_trials=_START_UP, warn_independent_sampling=False)

    def _failed(self, losses: Sequence[Sequence[float]]) -> dict[str, Any]:
        if losses:
            return {"values": np.max(losses, axis=0).tolist()}
        return {"state": TrialState.FAIL}  # nothing to compare with yet: only its place among the constraints counts


def _ranked(knob: Knob) -> bool:
    """Return whether Optuna sees the rank of a value instead of the value."""
    return isinstance(knob, ChoiceKnob) and knob.ordered


def _shown(knob: Knob, value: Value) -> Value:
    return knob.values.index(value) if isinstance(knob, ChoiceKnob) and knob.ordered else value


def _distribution(knob: Knob) -> BaseDistribution:
    if isinstance(knob, ChoiceKnob) and knob.ordered:
        return IntDistribution(0, len(knob.values) - 1)
    return distribution_of(knob)
