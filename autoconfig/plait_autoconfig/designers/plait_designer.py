"""Plait's own designer: what past services have in common, corrected by the trials of this one.

Before the first trial it proposes the cell that the library's background predicts to be best and probably feasible.
Each trial then determines how far that background can be trusted (`surrogate.posterior`), and the next proposal has
the largest expected improvement times probability of being feasible. Without a library there is no background. The
cost of a cell is often known before it runs: then only the rest of the goal, the goodput and the cost of memory, is
learned. Everything is evaluated on all cells: there is no inner search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from plait_autoconfig.confidence import NOISE, log_losses, noise_of
from plait_autoconfig.designers.base import SobolDesigner
from plait_autoconfig.library import LibraryRun, usable_runs, weight_of
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.surrogate import pooling
from plait_autoconfig.surrogate.posterior import (
    Background,
    Floats,
    Indices,
    Posterior,
    TrialData,
    expected_improvement,
    expected_regret,
    infer,
    margin_background,
    no_background,
    probability_above,
)
from plait_autoconfig.values import Cell, TrialOutcome, cells_of

_HOPELESS = 0.05
"""Cells that are less likely to be feasible are proposed only when no others are left: what almost surely fails is not
worth a run, as in `Confirm.sure`. What is merely doubtful is: optima often touch a limit."""
_WEIGHTINGS = 5
"""The number of distinct weightings when there are several goals. Each needs a background of its own, which is kept."""
_COSTED_UNIT = 0.3
"""The assumed spread, in log units, of what is still unknown when the costs are known; used until two cells have
been measured."""
_FIRST = 4
"""The number of space-filling trials to start with when there is no prior knowledge to improve on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """Beliefs about all N cells: the `loss`, in `unit` log units and up to a constant, and the probability that each is
    `feasible` (N,).

    `best` (K,): the lowest loss known to be feasible, under each hypothesis; None if there is none.
    """

    loss: Posterior
    unit: float
    feasible: Floats
    best: Floats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """What a library predicts about the cells of a space: backgrounds of the loss and of the margin to the limits."""

    loss: Background
    margin: Background


class PlaitDesigner(SobolDesigner):
    """See the module docstring. `pretrained`: of an earlier instance with the same space, library and context."""

    def __init__(
        self, space: Space, objective: Objective, *, pretrained: Pretrained | None = None, **given: Any
    ) -> None:
        super().__init__(space, objective, **given)
        self._pooled: dict[tuple[float, ...], Pretrained] = {}
        self._latest: tuple[object, Beliefs] | None = None
        if pretrained is not None:
            self._pooled[(float(len(self.cells)), 1.0)] = pretrained

    @property
    def pretrained(self) -> Pretrained:
        """What the library predicts before any trial; only for objectives with one goal."""
        self.objective.require_one_goal()
        with threadpool_limits(limits=1):
            return self._backgrounds(np.ones(1))

    def beliefs(self) -> Beliefs:
        """Return what the library and the trials so far imply for every cell: a pure function of them and the seed."""
        state = (len(self.trials), self.pending())
        if self._latest is None or self._latest[0] != state:
            with threadpool_limits(limits=1):
                self._latest = state, self._believed()
        return self._latest[1]

    def _believed(self) -> Beliefs:
        rng = np.random.default_rng([self.seed, len(self.trials)])
        weights = self._goal_weights()
        index, cells = self._seen()
        outcomes = [cell.outcome for cell in cells]
        back = self._backgrounds(weights)
        values = self._losses(outcomes, weights)
        if self._costed:
            log_costs = self._log_costs(cells)
            values = values + pooling.log_costs(outcomes) - log_costs[index]  # what is paid for memory stays in
        ran = np.isfinite(values)
        noise = self._noise(cells, weights)
        unit = _unit(back.loss, values[ran], noise, first=_COSTED_UNIT if self._costed else 1.0)
        repeats = np.array([float(len(cell.trials)) for cell in cells])
        shown = _levelled(values[ran] / unit, back.loss.mean[index[ran]])
        data = TrialData(index=index[ran], values=shown, repeats=repeats[ran], noise=noise / unit)
        loss = self._infer_with_pending(back.loss, data, rng)
        if self._costed:
            loss = replace(loss, means=loss.means + log_costs / unit)
        margins = TrialData(index=index, values=pooling.margins(self.objective, outcomes), repeats=repeats, noise=NOISE)
        margin = infer(back.margin, margins, rng)
        kept = index[np.array([self.objective.feasible(each) for each in outcomes], bool)]
        # Of the means, from which the noise is filtered out: a lucky measurement does not become the value to beat.
        best = loss.means[:, kept].min(1) if kept.size else None
        return Beliefs(loss=loss, unit=unit, feasible=probability_above(margin, 0.0), best=best)

    def expected_regret(self) -> float:
        """Return how much worse the best known cell is expected to be than the best of all, as a share of its loss.

        For stop rules: below 0.01, at most 1 % is left to gain. Infinite while nothing feasible is known.
        """
        beliefs = self.beliefs()
        if beliefs.best is None:
            return float("inf")
        rng = np.random.default_rng([self.seed, len(self.trials), 1])
        gain = expected_regret(beliefs.loss, beliefs.best, beliefs.feasible, rng)
        return float(-np.expm1(-gain * beliefs.unit))

    def _choose(self, open_cells: Indices) -> int:
        beliefs = self.beliefs()
        if beliefs.loss.trust == 0.0 and not self._costed and len(self._seen()[0]) < _FIRST:
            return super()._choose(open_cells)
        hopeful = open_cells[beliefs.feasible[open_cells] >= _HOPELESS]
        some = hopeful if hopeful.size else open_cells
        return int(some[self._scores(beliefs)[some].argmax()])

    def _scores(self, beliefs: Beliefs) -> Floats:
        """Return the score of each cell (N,): its expected gain times the probability that it is feasible."""
        if not self.trials:
            mean = beliefs.loss.mean()
            gain = np.maximum(np.median(mean) - mean, 1e-9)
        else:
            best = beliefs.best
            if best is None:  # anything feasible is worth having; better than the usual loss even more
                best = np.median(beliefs.loss.means, axis=1)
            gain = expected_improvement(beliefs.loss, best)
        return gain * beliefs.feasible

    @property
    def _costed(self) -> bool:
        """Whether the cost of the cells is known and part of the goal."""
        return bool(self.context.costs) and len(self.objective.goals) == 1 and self.objective.goals[0].has_cost

    def _log_costs(self, observed: Sequence[Cell]) -> Floats:
        """Return the log costs of all cells; as measured of those that are not of the space."""
        known = np.log(self.context.costs)
        measured = {self.index_of(cell.config): cell.outcome for cell in observed}
        own = pooling.log_costs([measured[at] for at in range(len(known), len(self.cells))])
        return np.asarray(np.concatenate([known, np.where(np.isfinite(own), own, known.max())]) - known.mean())

    @cached_property
    def _past(self) -> tuple[LibraryRun, ...]:
        return usable_runs(self.library, self.space, self.objective)

    def _seen(self) -> tuple[Indices, tuple[Cell, ...]]:
        """Return what was measured: the indices of the cells, and the cells themselves."""
        cells = cells_of(self.trials)
        return np.array([self._index[self.space.key(cell.config)] for cell in cells], np.intp), cells

    def _backgrounds(self, weights: Floats) -> Pretrained:
        """Return the backgrounds, computed once for each set of goal weights and cells."""
        key = (float(len(self.cells)), *weights.tolist())
        if key not in self._pooled:
            self._pooled[key] = self._pool(weights)
        return self._pooled[key]

    def _pool(self, weights: Floats) -> Pretrained:
        rng = np.random.default_rng(0)  # what is learned from a library depends on the library alone
        features = np.concatenate([self.features, self.space.encode(self.cells[len(self.features) :])])
        if not self._past:
            return Pretrained(loss=no_background(features), margin=margin_background(features))
        now = self.context
        own = {**now.workload, **now.hardware.features()}
        past = [{**run.workload, **run.hardware.features()} for run in self._past]
        names = pooling.context_names(past, own)
        context = pooling.context_row(own, names)
        losses, margins = [], []
        for run, then in zip(self._past, past, strict=True):
            cells, row = cells_of(run.trials), pooling.context_row(then, names)
            outcomes = [cell.outcome for cell in cells]
            weight = weight_of(run, versions=now.versions, hardware=now.hardware, at=now.at)
            losses.append(pooling.source_of(self.space, cells, self._losses(outcomes, weights), row, weight))
            values = pooling.margins(self.objective, outcomes)
            margins.append(pooling.source_of(self.space, cells, values, row, weight))
        return Pretrained(
            loss=pooling.pool(losses, features, context, rng),
            margin=pooling.pool(margins, features, context, rng, absolute=True),
        )

    def _goal_weights(self) -> Floats:
        """Return one weight per goal; with several goals, a few weightings alternate (ParEGO, Knowles 2006)."""
        count = len(self.objective.goals)
        if count == 1:
            return np.ones(1)
        round_number = len(self.trials) + len(self.pending())
        return np.random.default_rng([self.seed, round_number % _WEIGHTINGS]).dirichlet(np.ones(count))

    def _losses(self, outcomes: Sequence[TrialOutcome], weights: Floats) -> Floats:
        """Return log losses (n,), less the cost if that is known; with several goals the largest weighted one, each
        scaled by its own spread. NaN for failures."""
        each = [log_losses(goal, outcomes) for goal in self.objective.goals]
        if self._costed:
            return each[0] - pooling.log_costs(outcomes)
        if len(each) == 1 or not outcomes:
            return each[0]
        scaled = np.array([_standardised(values) for values in each]) * weights[:, None]
        return np.asarray(scaled.max(0) + 0.05 * scaled.sum(0))

    def _noise(self, cells: Sequence[Cell], weights: Floats) -> float:
        """Return the standard deviation of a trial about its cell, in log units, from the cells measured twice."""
        single = cells if len(self.objective.goals) == 1 else ()
        ran = [[trial.outcome for trial in cell.trials if trial.outcome.failure is None] for cell in single]
        return noise_of([self._losses(outcomes, weights) for outcomes in ran if outcomes])

    def _infer_with_pending(self, background: Background, data: TrialData, rng: np.random.Generator) -> Posterior:
        """Infer with pending cells counted as if they had met expectations (the kriging believer, Ginsbourger 2010)."""
        posterior = infer(background, data, rng)
        pending = np.array(self.pending(), np.intp)
        if not pending.size:
            return posterior
        believed = replace(
            data,
            index=np.concatenate([data.index, pending]),
            values=np.concatenate([data.values, posterior.mean()[pending]]),
            repeats=np.concatenate([data.repeats, np.ones(len(pending))]),
        )
        return infer(background, believed, rng)


def _unit(background: Background, values: Floats, noise: float, *, first: float) -> float:
    """Return the log units in one unit of the background; without a background the spread of the values if it exceeds
    the noise, and `first` until there are two."""
    if background.trust > 0.0:
        return background.unit
    return max(float(values.std()), noise) if len(values) > 1 else first


def _levelled(values: Floats, mean: Floats) -> Floats:
    """Shift the values (n,) to the level of the background's mean (n,) there: a service's own level carries no
    information, but one that lies many units away would be mistaken for a feature of the measured cells."""
    return values - (values - mean).mean() if values.size else values


def _standardised(values: Floats) -> Floats:
    known = values[np.isfinite(values)]
    if not known.size:
        return values
    return np.asarray((values - known.mean()) / (known.std() or 1.0))
