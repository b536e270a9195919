"""Paired comparisons over services: is a designer better than another, or at least not worse by more than a margin?

The unit is the service, not the search: seeds of one service share its table, so they are averaged first. Under the
null hypothesis the sign of each service's difference is a coin toss; all 2^S patterns are enumerated (a random
sample of them beyond S = 14), so the false-alarm rate is at most `ALPHA` whatever the distribution of the
differences.

Of many designers at once: Friedman's mean ranks over services, and Nemenyi's critical distance (Demsar 2006).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata, studentized_range

ALPHA = 0.05
_EXACT, _DRAWS = 14, 1 << 14


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the one-sided p-value that the mean of `differences` (S,) is below 0; 1 if there are none."""
    values = np.asarray(differences, np.float64)
    if not values.size:
        return 1.0
    if len(values) <= _EXACT:
        signs = 1.0 - 2.0 * ((np.arange(1 << len(values))[:, None] >> np.arange(len(values))) & 1)
    else:
        draws = np.random.default_rng(0).integers(0, 2, (_DRAWS, len(values)))
        signs = np.vstack([np.ones(len(values)), 1.0 - 2.0 * draws])
    return float((signs @ values <= values.sum() + 1e-9).mean())


def p_better(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the p-value against "ours are no lower than theirs"; one number per service."""
    return sign_flip_p([a - b for a, b in zip(ours, theirs, strict=True)])


def p_not_worse(ours: Sequence[float], theirs: Sequence[float], margin: float) -> float:
    """Return the p-value against "ours are higher than theirs by `margin` or more": small means non-inferior."""
    return sign_flip_p([a - b - margin for a, b in zip(ours, theirs, strict=True)])


def mean_ranks(losses: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean rank of each designer, 1 is best. `losses`: one row per designer, one number per service (K, S);
    equal ones share their ranks."""
    return [float(rank) for rank in rankdata(np.asarray(losses, np.float64), axis=0).mean(axis=1)]


def critical_distance(designers: int, services: int) -> float:
    """Return by how much mean ranks must differ to differ at the level `ALPHA`, for all pairs together."""
    q = float(studentized_range.isf(ALPHA, designers, np.inf)) / math.sqrt(2.0)
    return q * math.sqrt(designers * (designers + 1) / (6.0 * services))
