"""Bookkeeping shared by designers over listed cells: which were tried, which are pending, and the results.

A designer subclasses `CellDesigner` and chooses the next open cell (`_choose`). Legend: N cells, D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.designers.protocols import ServiceContext
from plait_autoconfig.errors import Exhausted
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, Trial

MAX_INVALID = 2
"""The number of invalid measurements after which a cell is given up."""


class CellDesigner(ABC):
    """`Designer` except for the choice of the next cell. Cells are identified by their index in `self.cells`."""

    def __init__(
        self,
        space: Space,
        objective: Objective,
        *,
        seed: int,
        library: Sequence[LibraryRun] = (),
        context: ServiceContext | None = None,
    ) -> None:
        self.space, self.objective = space, objective
        self.library, self.context = tuple(library), context or ServiceContext()
        self.cells = space.cells()
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self._index = {space.key(cell): index for index, cell in enumerate(self.cells)}
        self._open = np.ones(len(self.cells), bool)
        self._invalid: dict[Hashable, int] = {}
        self._pending: set[Hashable] = set()
        self.trials: list[Trial] = []  # all that were told, in order

    @abstractmethod
    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        """Return which of the open cells (indices, ascending, at least one) to propose."""

    def expected_regret(self) -> float:
        """Return infinity: nothing is known of what was not tried."""
        return float("inf")

    @cached_property
    def features(self) -> NDArray[np.float64]:
        """All cells as numbers, (N, D); see `Space.encode`."""
        return self.space.encode(self.cells)

    def pending(self) -> tuple[int, ...]:
        """Return the cells that were asked for and have no trial yet, ascending."""
        return tuple(sorted(self._index[key] for key in self._pending))

    def index_of(self, config: Config) -> int | None:
        """Return the index of a cell; None for a valid configuration that is not in the sample."""
        return self._index.get(self.space.key(config))

    def nearest(self, config: Config, among: NDArray[np.intp]) -> int:
        """Return whichever of these cells is most similar to a configuration (L1 distance of `features`)."""
        distances = np.abs(self.features[among] - self.space.encode([config])).sum(axis=1)
        return int(among[distances.argmin()])

    def ask(self) -> Config:
        """Return the cell that `_choose` picks among the open ones, and mark it pending."""
        open_cells = np.flatnonzero(self._open)
        if not open_cells.size:
            sample = "" if self.space.exhaustive else " of the sample"
            raise Exhausted(f"all {len(self.cells)} cells{sample} were proposed")
        index = int(self._choose(open_cells))
        self._open[index] = False
        self._pending.add(self.space.key(self.cells[index]))
        return dict(self.cells[index])

    def tell(self, trial: Trial) -> None:
        """Check and record the trial, and close its cell unless the measurement was invalid."""
        config = self.space.check(trial.config)
        self.objective.losses(trial.outcome)
        self.objective.excesses(trial.outcome)
        key = self.space.key(config)
        known = replace(trial, config=config)
        self.trials.append(known)
        self._pending.discard(key)
        index = self._index.get(key)
        if index is not None:
            self._open[index] = self._reopens(key, known)

    def drop(self, config: Config) -> None:
        """Open a pending cell again."""
        key = self.space.key(self.space.check(config))
        if key in self._pending:
            self._pending.discard(key)
            self._open[self._index[key]] = True

    def _reopens(self, key: Hashable, trial: Trial) -> bool:
        """Return whether the cell may be proposed (again) after this trial."""
        if not trial.outcome.invalid:
            self._invalid[key] = MAX_INVALID  # it is known now: later invalid repeats change nothing
            return False
        self._invalid[key] = self._invalid.get(key, 0) + 1
        return self._invalid[key] < MAX_INVALID
