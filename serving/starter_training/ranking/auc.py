"""Area under the ROC curve."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Return the probability that a positive scores above a negative, ties counted half (Mann-Whitney U over the number
    of pairs).

    Raises ValueError if one of the two is missing.
    """
    is_positive = np.asarray(labels, dtype=bool).ravel()
    _, place, counts = np.unique(np.asarray(scores, dtype=np.float64).ravel(), return_inverse=True, return_counts=True)
    positives = int(is_positive.sum())
    negatives = is_positive.size - positives
    if not positives or not negatives:
        raise ValueError("AUC needs positives and negatives")
    last_rank = np.cumsum(counts)
    rank = (last_rank - (counts - 1) / 2)[place]
    return float((rank[is_positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))
