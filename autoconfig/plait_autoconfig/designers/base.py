"""The designer: a search that proposes configurations (`ask`) and learns from their results (`tell`). It keeps which
cells are open, and the results; a subclass chooses the next one. Three that learn nothing are here: at random, cell by
cell, and along a scrambled Sobol sequence; what others must beat.

Legend: N cells, D features.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.errors import Exhausted
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space, sobol_points
from plait_autoconfig.values import Config, Trial, TuningSubject

MAX_INVALID = 2
"""The number of invalid measurements after which a cell is given up."""
_MAX_DRAWS = 256  # then most cells are closed, and a random open one fills the gap as well


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext(TuningSubject):
    """What is known about the service before its first trial."""

    at: str = ""
    """The date (ISO 8601); if empty, the age of library runs is ignored."""


class Designer(ABC):
    """A search in one space. It is a state machine without clock or files; a seed makes it fully deterministic.

    `library`: past runs of other services, usable or not. Cells are identified by their index in `cells`: those of the
    space, then what else was measured, where these are a sample.
    """

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
        self._pending: set[Hashable] = set()
        self._counts: Counter[Hashable] = Counter()  # of trials; a valid one counts as `MAX_INVALID`
        self.trials: list[Trial] = []  # all that were told, in order

    @abstractmethod
    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        """Return which of the open cells (indices, ascending, at least one) to propose."""

    def expected_regret(self) -> float:
        """Return how much worse the best known cell is expected to be than the best of all, as a share of its loss;
        infinite if nothing is known of what was not tried."""
        return float("inf")

    @cached_property
    def features(self) -> NDArray[np.float64]:
        """All cells of the space as numbers, (N, D); see `Space.encode`."""
        return self.space.encode(self.space.cells())

    def pending(self) -> tuple[int, ...]:
        """Return the cells that were asked for and have no trial yet, ascending."""
        return tuple(sorted(self._index[key] for key in self._pending))

    def index_of(self, config: Config) -> int | None:
        """Return the index of a cell; None for a valid configuration that is neither in the sample nor measured."""
        return self._index.get(self.space.key(config))

    def nearest(self, config: Config, among: NDArray[np.intp]) -> int:
        """Return whichever of these cells is most similar to a configuration (L1 distance of `features`)."""
        distances = np.abs(self.features[among] - self.space.encode([config])).sum(axis=1)
        return int(among[distances.argmin()])

    def ask(self) -> Config:
        """Return the next configuration to measure: a cell that was never asked for or told before, unless invalid.

        May be called several times before `tell`. A cell whose trial was `FailureKind.INVALID` may be proposed once
        more. Raises `Exhausted` when every cell has been proposed.
        """
        is_open = (key not in self._pending and self._counts[key] < MAX_INVALID for key in self._index)
        open_cells = np.flatnonzero(np.fromiter(is_open, bool, len(self.cells)))
        if not open_cells.size:
            sample = "" if self.space.exhaustive else " of the sample"
            raise Exhausted(f"all {len(self.space.cells())} cells{sample} were proposed")
        cell = self.cells[self._choose(open_cells)]
        self._pending.add(self.space.key(cell))
        return dict(cell)

    def tell(self, trial: Trial) -> None:
        """Learn from a trial, asked for or not. Several trials of one cell are repeats and are averaged.

        Raises `OutsideSpace` for a configuration of another space, `ObjectiveError` for a missing metric; neither
        changes any state.
        """
        config = self.space.check(trial.config)
        self.objective.losses(trial.outcome)
        self.objective.excesses(trial.outcome)
        key = self.space.key(config)
        self.trials.append(replace(trial, config=config))
        self._pending.discard(key)
        self._counts[key] += 1 if trial.outcome.invalid else MAX_INVALID
        if key not in self._index and not trial.outcome.invalid:
            self._index[key] = len(self.cells)
            self.cells = (*self.cells, config)

    def expect(self, configs: Iterable[Config]) -> None:
        """Take these, and nothing else, for what is being measured, whoever asked for it. What was asked for and will
        not be measured may be proposed again."""
        self._pending = self._index.keys() & set(map(self.space.key, configs))


class RandomDesigner(Designer):
    """Random search: every open cell is equally likely."""

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        return int(self.rng.choice(open_cells))


class GridDesigner(Designer):
    """Grid search in which the last knob varies fastest. The seed has no effect."""

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        return int(open_cells[0])


class SobolDesigner(Designer):
    """Draw points and take the first whose cell is open or, if the cells are a sample, the nearest open one."""

    def __init__(self, space: Space, objective: Objective, **given: Any) -> None:
        super().__init__(space, objective, **given)
        self._points = sobol_points(len(space.knobs), seed=self.seed)

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        if not self.space.exhaustive:
            return self.nearest(self.space.configuration_at(next(self._points)), open_cells)
        still_open = set(open_cells.tolist())
        for point in itertools.islice(self._points, _MAX_DRAWS):
            index = self.index_of(self.space.configuration_at(point))
            if index is not None and index in still_open:
                return index
        return int(self.rng.choice(open_cells))
