"""Morphling's search (Wang et al., SoCC 2021), whose code was never released, re-implemented from the paper.

A network is meta-trained on the library (`surrogate.maml`). Each trial then takes gradient steps on the trials so
far and proposes the cell with the largest f'(x) + delta * |f(x) - f'(x)| over all cells, where f and f' are the
network before and after those steps. The paper leaves delta, the learning rates and the number of steps open; they
were chosen here.

Two things favour it over other re-implementations. It learns standardised logarithms: on raw values with a ReLU at
its head it collapses to zeros (seen in IBM's LLM-Pilot comparison). And because the level of a new service is
unknown, trials are shifted by the mean difference from the meta-model. Failures and violated limits count as one
spread worse than the worst trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

from plait_autoconfig.designers.base import CellDesigner
from plait_autoconfig.designers.protocols import ServiceContext
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.surrogate import reading
from plait_autoconfig.surrogate.background import Floats, Indices
from plait_autoconfig.surrogate.maml import Network, fresh_network, meta_trained
from plait_autoconfig.surrogate.threads import one_thread
from plait_autoconfig.values import Cell

_DELTA = 0.2
_STEPS = 10


class MorphlingDesigner(CellDesigner):
    """Morphling's search; see the module docstring. `network`: learned by an earlier instance from the same library."""

    name: ClassVar[str] = "morphling"

    def __init__(
        self,
        space: Space,
        objective: Objective,
        *,
        seed: int,
        library: Sequence[LibraryRun] = (),
        context: ServiceContext | None = None,
        network: Network | None = None,
        meta_steps: int = 1500,
    ) -> None:
        super().__init__(space, objective, seed=seed, library=library, context=context)
        self._goal = objective.require_one_goal()
        self._seed, self._given, self._meta_steps = seed, network, meta_steps

    @cached_property
    def meta_model(self) -> Network:
        """The network before any trial of this service; its outputs are higher for better cells."""
        if self._given is not None:
            return self._given
        services = [(self.space.encode([cell.config for cell in cells]), values) for cells, values, _ in self._past]
        if not services:
            return fresh_network(self.features.shape[1], self._seed)
        return meta_trained(services, self._seed, steps=self._meta_steps)

    @cached_property
    def _past(self) -> list[tuple[Sequence[Cell], Floats, float]]:
        """Cells, standardised values and spread of each past service with at least two results."""
        found: list[tuple[Sequence[Cell], Floats, float]] = []
        for past in reading.past_services(self.library, self.space, self.objective, self.context):
            values = self._values(past.cells)
            spread = float(values.std())
            if spread > 0.0:
                found.append((past.cells, (values - values.mean()) / spread, spread))
        return found

    @cached_property
    def _spread(self) -> float:
        """The spread of a service in log units: the library's typical one."""
        return float(np.median([spread for *_, spread in self._past])) if self._past else 1.0

    def _choose(self, open_cells: Indices) -> int:
        with one_thread():
            return self._most_promising(open_cells)

    def _most_promising(self, open_cells: Indices) -> int:
        seen = self.observed()
        before = self.meta_model.predict(self.features)
        if not seen:
            return int(open_cells[before[open_cells].argmax()])
        rows, values = self.space.encode([cell.config for cell in seen]), self._values(seen) / self._spread
        values = values - (values - self.meta_model.predict(rows)).mean()
        earlier = self.meta_model if len(seen) == 1 else self.meta_model.adapted(rows[:-1], values[:-1], _STEPS)
        after = self.meta_model.adapted(rows, values, _STEPS).predict(self.features)
        score = after + _DELTA * np.abs(earlier.predict(self.features) - after)
        return int(open_cells[score[open_cells].argmax()])

    def _values(self, cells: Sequence[Cell]) -> Floats:
        """Return values in log units, higher is better; infeasible is one spread worse than the worst feasible."""
        values = -reading.log_losses(self._goal, [cell.outcome for cell in cells])
        feasible = np.array([self.objective.feasible(cell.outcome) for cell in cells])
        known = values[feasible]
        worst = float(known.min() - (known.std() or 1.0)) if known.size else 0.0
        return np.where(feasible, values, worst)
