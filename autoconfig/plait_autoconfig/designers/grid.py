"""Grid search: one cell after the other, in the order of the space, as most tools do."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.designers.base import CellDesigner


class GridDesigner(CellDesigner):
    """Grid search in which the last knob varies fastest. The seed has no effect."""

    name: ClassVar[str] = "grid"

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        return int(open_cells[0])
