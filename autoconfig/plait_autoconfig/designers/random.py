"""Uniformly at random without replacement: the yardstick of every other designer."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.designers.base import CellDesigner


class RandomDesigner(CellDesigner):
    """Every open cell is as likely as any other."""

    name: ClassVar[str] = "random"

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        return int(self.rng.choice(open_cells))
