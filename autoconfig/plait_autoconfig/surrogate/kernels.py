"""The covariance of the smooth parts."""

from __future__ import annotations

import numpy as np

from plait_autoconfig.surrogate.background import Floats

_SQRT5 = np.sqrt(5.0)


def matern(squares: Floats) -> Floats:
    """Return the Matern 5/2 covariance of squared distances in length scales (Rasmussen & Williams 2006, eq. 4.17)."""
    scaled = _SQRT5 * np.sqrt(squares)
    return np.asarray((1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled))


def matern_between(left: Floats, right: Floats) -> Floats:
    """Return `matern` between all rows of two matrices (n, D), (m, D), already divided by the length scales: (n, m)."""
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1)[None, :] - 2.0 * (left @ right.T)
    return matern(np.maximum(squares, 0.0))
