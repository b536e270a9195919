"""Which cell to try next, and how much further trials can still gain. Symbols: N cells, K hypotheses."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from plait_autoconfig.surrogate.background import Floats, Indices
from plait_autoconfig.surrogate.posterior import Posterior


def expected_improvement(posterior: Posterior, best: Floats) -> Floats:
    """Return how much lower than the best known value each cell is expected to be (N,), over all hypotheses.

    `best` (K,): the best known value under each of them (Mockus 1978; averaged as by Snoek et al., NeurIPS 2012).
    """
    gap = best[:, None] - posterior.means
    z = gap / posterior.sds
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    return np.asarray(posterior.weights @ np.maximum(gap * ndtr(z) + posterior.sds * density, 0.0))


def best_known(posterior: Posterior, feasible: Indices) -> Floats:
    """Return the lowest posterior mean among the `feasible` cells (at least one), by hypothesis (K,).

    The noise is filtered out: a lucky measurement does not become the value to beat.
    """
    return np.asarray(posterior.means[:, feasible].min(1))


def probability_above(posterior: Posterior, threshold: float) -> Floats:
    """Return the probability that each cell's true value is above the threshold (N,)."""
    return np.asarray(posterior.weights @ ndtr((posterior.means - threshold) / posterior.sds))


def expected_regret(posterior: Posterior, best: Floats, feasible: Floats, rng: np.random.Generator) -> float:
    """Return how much lower than the best known value the lowest of all cells is expected to be; `feasible` (N,) are
    probabilities.

    Cells count as independent, which overestimates rather than underestimates: a search that stops by this value
    stops late. Only the `_MAX` most promising cells are sampled.
    """
    score = feasible * expected_improvement(posterior, best)
    some = np.argsort(-score, kind="stable")[:_MAX]
    which = rng.choice(len(posterior.weights), size=_DRAWS, p=posterior.weights)
    drawn = posterior.means[which][:, some] + posterior.sds[which][:, some] * rng.standard_normal((_DRAWS, len(some)))
    gain = np.where(rng.random(drawn.shape) < feasible[some], best[which, None] - drawn, 0.0)
    return float(np.maximum(gain.max(1), 0.0).mean())


_MAX, _DRAWS = 200, 500
