"""A forest over all past services, whose order is tried from the top: what needs no tuner at all.

On the first five trials it is the peer to beat. It never looks at a result of the new service.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from plait_autoconfig.designers.base import CellDesigner
from plait_autoconfig.designers.protocols import ServiceContext
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.surrogate import reading
from plait_autoconfig.surrogate.threads import one_thread

_TREES, _LEAF, _MAX_ROWS = 200, 2, 20_000


class ForestOrderDesigner(CellDesigner):
    """The static order; a random one without a usable run."""

    name: ClassVar[str] = "forest-order"

    def __init__(
        self,
        space: Space,
        objective: Objective,
        *,
        seed: int,
        library: Sequence[LibraryRun] = (),
        context: ServiceContext | None = None,
    ) -> None:
        super().__init__(space, objective, seed=seed, library=library, context=context)
        self._goal = objective.require_one_goal()

    @cached_property
    def predicted(self) -> NDArray[np.float64]:
        """The predicted log loss of every cell (N,), in spreads of a service."""
        rows, values = [], []
        for past in reading.past_services(self.library, self.space, self.objective, self.context):
            losses = reading.log_losses(self._goal, [cell.outcome for cell in past.cells])
            kept = np.array([self.objective.feasible(cell.outcome) for cell in past.cells], bool)
            if kept.sum() < 2:
                continue
            worst = losses[kept].max() + losses[kept].std()
            scaled = (np.where(kept, losses, worst) - losses[kept].mean()) / (losses[kept].std() or 1.0)
            rows.append(self.space.encode([cell.config for cell in past.cells]))
            values.append(scaled)
        if not rows:
            return self.rng.permutation(len(self.cells)).astype(float)
        with one_thread():
            return np.asarray(_fitted(rows, values).predict(self.features))

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        return int(open_cells[self.predicted[open_cells].argmin()])


def _fitted(rows: Sequence[NDArray[np.float64]], values: Sequence[NDArray[np.float64]]) -> ExtraTreesRegressor:
    features, targets = np.concatenate(rows), np.concatenate(values)
    some = np.random.default_rng(0).permutation(len(features))[:_MAX_ROWS]
    forest = ExtraTreesRegressor(n_estimators=_TREES, min_samples_leaf=_LEAF, random_state=0, n_jobs=1)
    return forest.fit(features[some], targets[some])
