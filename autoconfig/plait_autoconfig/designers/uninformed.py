"""Searches that learn nothing: at random, cell by cell, and along a scrambled Sobol sequence. What others must beat."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.designers.base import Designer
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space, sobol_points

_MAX_DRAWS = 256  # then most cells are closed, and a random open one fills the gap as well


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
