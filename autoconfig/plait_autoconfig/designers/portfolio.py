"""A fixed order learned from the library: first the cells that together served past services best.

Greedy: the next cell is the one that most lowers the best-so-far regret averaged over past runs (the portfolios of
Wistuba et al., "Sequential model-free hyperparameter tuning", ICDM 2015). It learns nothing from the new service,
and is hard to beat in the first few trials.

Legend: R runs, N cells; the regret of a cell in a run is how far its value is from the best of that run, 0 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.designers.base import CellDesigner
from plait_autoconfig.library import LibraryRun, usable_runs, weight_of
from plait_autoconfig.objective import Objective
from plait_autoconfig.values import Cell, cells_of

_NEIGHBOURS = 5

_Floats = NDArray[np.float64]


class PortfolioDesigner(CellDesigner):
    """The static order; a random one without a usable run."""

    name: ClassVar[str] = "portfolio"

    @cached_property
    def _regrets(self) -> _Floats:
        """The regrets (R, N); cells that a run did not measure are estimated from its nearest measured cells."""
        rows = [self._row(run) for run in self._runs]
        return np.asarray(rows, np.float64).reshape(len(rows), len(self.cells))

    @cached_property
    def _runs(self) -> tuple[LibraryRun, ...]:
        return usable_runs(self.library, self.space, self.objective)

    @cached_property
    def _weights(self) -> _Floats:
        """The weights of the runs (R,), sum 1: runs that are old or from other hardware or versions count less."""
        now = self.context
        weights = [weight_of(run, versions=now.versions, hardware=now.hardware, at=now.at) for run in self._runs]
        return np.asarray(weights, np.float64) / sum(weights)

    @cached_property
    def _covered(self) -> _Floats:
        """The lowest regret of each run (R,) among the cells proposed so far; changed in place."""
        return np.ones(len(self._runs))

    @cached_property
    def _shuffled(self) -> NDArray[np.intp]:
        """The position of each cell in a random order (N,), to break ties."""
        return self.rng.permutation(len(self.cells))

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        if not self._runs:
            return int(open_cells[self._shuffled[open_cells].argmin()])
        regrets = self._regrets[:, open_cells]
        covered = self._weights @ np.minimum(self._covered[:, None], regrets)
        mean = self._weights @ regrets
        best = np.lexsort((self._shuffled[open_cells], mean.round(12), covered.round(12)))[0]
        self._covered[:] = np.minimum(self._covered, regrets[:, best])
        return int(open_cells[best])

    def _row(self, run: LibraryRun) -> _Floats:
        cells = cells_of(run.trials)
        known = np.asarray(regrets(cells, self.objective), np.float64)
        configs = [cell.config for cell in cells]
        places = [self.index_of(config) for config in configs]
        row = np.full(len(self.cells), np.nan)
        for place, regret in zip(places, known, strict=True):
            if place is not None:
                row[place] = regret
        unknown = np.isnan(row)
        row[unknown] = _nearest_means(self.features[unknown], self.space.encode(configs), known)
        return row


def regrets(cells: Sequence[Cell], objective: Objective) -> list[float]:
    """Return how far each cell is from the best feasible one of the same run, in [0, 1]: 0 is the best, 1 is
    infeasible.

    For positive metrics 1 - best / value (or value / best where more is better), otherwise relative to the range
    seen. Several goals: the mean. If nothing is feasible, all are 1.
    """
    feasible = [cell for cell in cells if objective.feasible(cell.outcome)]
    by_goal = []
    for goal in objective.goals:
        values = [cell.outcome.metrics[goal.metric] for cell in feasible]
        sign = 1.0 if goal.direction == "min" else -1.0
        by_goal.append(_relative(np.asarray(values, np.float64), sign))
    own = dict(zip(map(id, feasible), np.mean(by_goal, axis=0).tolist(), strict=True))
    return [own.get(id(cell), 1.0) for cell in cells]


def _relative(values: _Floats, sign: float) -> _Floats:
    if not values.size:
        return values
    best = (sign * values).min() * sign
    if values.min() > 0.0:
        return np.asarray(1.0 - (best / values if sign > 0 else values / best))
    span = float(np.ptp(values)) or 1.0
    return np.asarray(np.abs(values - best) / span)


def _nearest_means(wanted: _Floats, measured: _Floats, values: _Floats) -> _Floats:
    """Return (N,): for each of (N, D) points the mean of the nearest of (M, D) measured values, by L1 distance."""
    count = min(_NEIGHBOURS, len(values))
    means = np.empty(len(wanted))
    for start in range(0, len(wanted), 256):  # bounds the memory to 256 x M x D numbers
        distances = np.abs(wanted[start : start + 256, None, :] - measured[None, :, :]).sum(axis=2)
        nearest = np.argpartition(distances, count - 1, axis=1)[:, :count]
        means[start : start + 256] = values[nearest].mean(axis=1)
    return means
