"""Optuna's TPE and GP samplers as designers: the alternatives that users would otherwise run, given their best chance.

Both see unmodified losses, the limits as constraints (`Trial.set_constraint`), pending trials as running, and
conditional knobs as ordinary ones. Optuna ignores trials that end as FAIL, so it would propose the same corner
again; therefore a failed configuration counts as one that violates every limit: a pruned trial without a value for
TPE, and a trial with the worst loss seen for the GP, which needs a value. Only an invalid measurement ends as FAIL.
Neither sampler knows which cells were tried or which constraints hold between knobs: a suggestion that is not an
open cell is drawn again, and after `_max_asks` draws replaced by the nearest open cell, from which the sampler then
learns. Optuna has no ordered categories: to a category of the values 1, 2, 4 and 8 all are equally far apart. So an
ordered choice goes to Optuna as an integer, its rank, which is how its samplers learn from neighbours.

The defaults are those of Optuna's authors: ten random trials come first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import TrialState

from plait_autoconfig.designers.base import CellDesigner
from plait_autoconfig.knobs import ChoiceKnob, Knob
from plait_autoconfig.objective import Objective
from plait_autoconfig.optuna_forms import distribution_of, quiet
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, Trial, TrialOutcome

_START_UP = 10
"""The random trials at the start."""

_RUNS = "runs"
"""The name of the constraint when the objective has no limits: 1 for a failed trial, -1 for one that ran."""


class OptunaDesigner(CellDesigner):
    """An Optuna study as a designer. All calls to Optuna are made here; subclasses choose the sampler."""

    _max_asks: ClassVar[int]

    def __init__(self, space: Space, objective: Objective, **given: Any) -> None:
        super().__init__(space, objective, **given)
        self._distributions = {knob.name: _distribution(knob) for knob in space.knobs}
        self._running: dict[Hashable, optuna.trial.Trial] = {}
        self._study = self._fresh_study()

    @abstractmethod
    def _sampler(self, seed: int) -> BaseSampler:
        """Return the sampler, with its own defaults."""

    @abstractmethod
    def _tell_failed(self, asked: optuna.trial.Trial) -> None:
        """Report a failed trial to the study; its constraints are already set."""

    def tell(self, trial: Trial) -> None:
        """Report the trial to the study, which is rebuilt if earlier trials now count differently."""
        super().tell(trial)
        if self._outdates(trial):
            self._start_anew()
        else:
            self._record(self.trials[-1])

    def drop(self, config: Config) -> None:
        """Reopen the cell, and end its running trial in the study as FAIL."""
        super().drop(config)
        asked = self._running.pop(self.space.key(config), None)
        if asked is not None:
            self._study.tell(asked, state=TrialState.FAIL)

    def _outdates(self, trial: Trial) -> bool:  # noqa: ARG002  # the GP asks
        """Return whether earlier trials count differently from now on."""
        return False

    def _start_anew(self) -> None:
        self._running = {}
        self._study = self._fresh_study()
        for trial in self.trials:
            self._record(trial)
        for index in self.pending():
            self._start(self.cells[index])

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        still_open = set(open_cells.tolist())
        for _ in range(self._max_asks if self.space.exhaustive else 1):
            asked = self._study.ask(self._distributions)
            suggested = self._active(asked.params)
            index = self.index_of(suggested)
            if index is not None and index in still_open:
                self._running[self.space.key(suggested)] = asked
                return index
            self._study.tell(asked, state=TrialState.FAIL)
        nearest = self.nearest(suggested, open_cells)
        self._start(self.cells[nearest])
        return nearest

    def _active(self, params: dict[str, Any]) -> Config:
        """Return the configuration that a suggestion stands for, without the knobs that are inactive in it."""
        given = {
            knob.name: knob.value_at(params[knob.name]) if _ranked(knob) else params[knob.name]
            for knob in self.space.knobs
        }
        return self.space.check(given, constrained=False)

    def _start(self, config: Config) -> None:
        """Make the sampler see this cell as a running trial."""
        params = {knob.name: config.get(knob.name, knob.draw(0.5)) for knob in self.space.knobs}
        ranks = {
            knob.name: knob.values.index(params[knob.name])
            for knob in self.space.knobs
            if isinstance(knob, ChoiceKnob) and _ranked(knob)
        }
        self._study.enqueue_trial(params | ranks)
        self._running[self.space.key(config)] = self._study.ask(self._distributions)

    def _record(self, trial: Trial) -> None:
        key = self.space.key(trial.config)
        if key not in self._running:
            self._start(trial.config)
        asked = self._running.pop(key)
        if trial.outcome.invalid:
            self._study.tell(asked, state=TrialState.FAIL)
            return
        for name, value in self._constraints(trial.outcome).items():
            asked.set_constraint(name, value)
        losses = self.objective.losses(trial.outcome)
        if losses is None:
            self._tell_failed(asked)
        else:
            self._study.tell(asked, list(losses))

    def _constraints(self, outcome: TrialOutcome) -> dict[str, float]:
        """Return what the sampler keeps at or below 0. Failures violate every limit by the most seen in any trial."""
        if not self.objective.limits:
            if not any(_failed(trial.outcome) for trial in self.trials):
                return {}
            return {_RUNS: 1.0 if _failed(outcome) else -1.0}
        if not _failed(outcome):
            return self.objective.excesses(outcome)
        seen = [self.objective.excesses(trial.outcome) for trial in self.trials if trial.outcome.failure is None]
        return {str(each): max([1.0, *(row[str(each)] for row in seen)]) for each in self.objective.limits}

    def _fresh_study(self) -> optuna.Study:
        with quiet():
            return optuna.create_study(
                directions=["minimize"] * len(self.objective.goals),
                sampler=self._sampler(int(self.rng.integers(2**31))),
            )


class OptunaTpeDesigner(OptunaDesigner):
    """Tree-structured Parzen estimator with the defaults of Optuna 5 (multivariate, constant liar)."""

    _max_asks: ClassVar[int] = 16

    def _sampler(self, seed: int) -> BaseSampler:
        return TPESampler(seed=seed, n_startup_trials=_START_UP)

    def _tell_failed(self, asked: optuna.trial.Trial) -> None:
        self._study.tell(asked, state=TrialState.PRUNED)


class OptunaGpDesigner(OptunaDesigner):
    """Gaussian process with logarithmic (constrained) expected improvement and Optuna's defaults."""

    _max_asks: ClassVar[int] = 2  # it would mostly suggest the same cell again, at the price of a fit

    def _sampler(self, seed: int) -> BaseSampler:
        return GPSampler(seed=seed, n_startup_trials=_START_UP, warn_independent_sampling=False)

    def _outdates(self, trial: Trial) -> bool:
        """Return True for a failure, and for the first value after failures, which gives them one (`_tell_failed`)."""
        ran = [each for each in self.trials if each.outcome.failure is None]
        return _failed(trial.outcome) or (len(ran) == 1 < len(self.trials) and ran[0] is self.trials[-1])

    def _tell_failed(self, asked: optuna.trial.Trial) -> None:
        losses = [losses for trial in self.trials if (losses := self.objective.losses(trial.outcome)) is not None]
        if losses:
            self._study.tell(asked, np.max(losses, axis=0).tolist())
        else:  # nothing to compare with yet: only its place among the constraints would count, and there is no value
            self._study.tell(asked, state=TrialState.FAIL)


def _ranked(knob: Knob) -> bool:
    """Return whether Optuna sees the rank of a value instead of the value."""
    return isinstance(knob, ChoiceKnob) and knob.ordered


def _distribution(knob: Knob) -> BaseDistribution:
    if isinstance(knob, ChoiceKnob) and knob.ordered:
        return IntDistribution(0, len(knob.values) - 1)
    return distribution_of(knob)


def _failed(outcome: TrialOutcome) -> bool:
    return outcome.failure is not None and not outcome.invalid
