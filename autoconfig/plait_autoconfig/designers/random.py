"""Uniformly random search without replacement: the baseline for every other designer."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.designers.base import CellDesigner


class RandomDesigner(CellDesigner):
    """Random search: every open cell is equally likely."""

    name: ClassVar[str] = "random"

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        return int(self.rng.choice(open_cells))
