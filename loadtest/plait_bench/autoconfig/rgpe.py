"""RGPE: an ensemble of one Gaussian process per past service and one of the new one, weighted by how well they rank.

Feurer, Letham, Bakshy, "Scalable meta-learning for Bayesian optimization using ranking-weighted Gaussian process
ensembles" (arXiv 1802.02219): weights are the shares of posterior draws in which a model ranks the new service's
trials with the fewest mistakes (the new model by leave-one-out), and a model that is mostly worse than the new one
is dropped (section 4.3). Used only in this benchmark. Source processes see at most `_POINTS` cells each. Symbols: N
cells, n trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from plait_autoconfig.designers.base import CellDesigner
from plait_autoconfig.designers.protocols import ServiceContext
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.surrogate import reading

_POINTS, _DRAWS = 90, 128

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The Gaussian processes of past services, as means and standard deviations over all cells: (S, N) each."""

    means: Floats
    sds: Floats


class RgpeDesigner(CellDesigner):
    """The designer of the module docstring. `ensemble`: that of an earlier instance with the same library."""

    name: ClassVar[str] = "rgpe"

    def __init__(
        self,
        space: Space,
        objective: Objective,
        *,
        seed: int,
        library: Sequence[LibraryRun] = (),
        context: ServiceContext | None = None,
        ensemble: Ensemble | None = None,
    ) -> None:
        super().__init__(space, objective, seed=seed, library=library, context=context)
        self._goal, self._given = objective.require_one_goal(), ensemble

    @cached_property
    def ensemble(self) -> Ensemble:
        """The ensemble fitted to the library, on standardised log losses."""
        if self._given is not None:
            return self._given
        rng, means, sds = np.random.default_rng(0), [], []
        for past in reading.past_services(self.library, self.space, self.objective, self.context):
            losses = reading.log_losses(self._goal, [cell.outcome for cell in past.cells])
            ran = np.flatnonzero(np.isfinite(losses))
            some = rng.permutation(ran)[:_POINTS]
            rows = self.space.encode([past.cells[at].config for at in some])
            mean, sd = _process(rows, _standard(losses[some]), self.features)
            means.append(mean)
            sds.append(sd)
        shape = (len(means), len(self.cells))
        return Ensemble(np.reshape(means, shape), np.reshape(sds, shape))

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        known = [(self.index_of(cell.config), cell) for cell in self.observed()]
        seen = np.array([at for at, _ in known], np.intp)
        past = self.ensemble
        if not seen.size:
            if not len(past.means):
                return int(self.rng.choice(open_cells))
            return int(open_cells[past.means.mean(0)[open_cells].argmin()])
        losses = reading.log_losses(self._goal, [cell.outcome for _, cell in known])
        feasible = np.array([self.objective.feasible(cell.outcome) for _, cell in known])
        worst = losses[feasible].max() + (losses[feasible].std() or 1.0) if feasible.any() else 0.0
        values = _standard(np.where(feasible, losses, worst))
        own_mean, own_sd = _process(self.features[seen], values, self.features)
        weights = self._weights(past, seen, values)
        mean = weights @ np.vstack([past.means, own_mean])
        sd = np.sqrt(weights**2 @ np.vstack([past.sds, own_sd]) ** 2)
        best = mean[seen[feasible]].min() if feasible.any() else float(np.median(mean))
        z = (best - mean) / np.maximum(sd, 1e-9)
        gain = (best - mean) * ndtr(z) + sd * np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
        return int(open_cells[gain[open_cells].argmax()])

    def _weights(self, past: Ensemble, seen: NDArray[np.intp], values: Floats) -> Floats:
        """Return the ensemble weights (S + 1,), the last for the new service's own process."""
        sources = len(past.means)
        if len(seen) < 3 or not sources:
            return np.full(sources + 1, 1.0 / max(1, sources)) * (np.arange(sources + 1) < max(1, sources))
        normal = self.rng.standard_normal((sources + 1, _DRAWS, len(seen)))
        own_mean, own_sd = _left_out(self.features[seen], values)
        means = np.vstack([past.means[:, seen], own_mean])
        sds = np.vstack([past.sds[:, seen], own_sd])
        drawn = means[:, None, :] + sds[:, None, :] * normal
        order = values[:, None] < values[None, :]
        mistakes = ((drawn[..., :, None] < drawn[..., None, :]) != order).sum((2, 3)).astype(float)  # (S + 1, draws)
        dropped = np.median(mistakes[:-1], axis=1) > np.quantile(mistakes[-1], 0.95)
        mistakes[:-1][dropped] = np.inf
        ties = mistakes == mistakes.min(0)
        return np.asarray((ties / ties.sum(0)).mean(1))


def _process(rows: Floats, values: Floats, wanted: Floats) -> tuple[Floats, Floats]:
    from sklearn.gaussian_process import GaussianProcessRegressor

    process = GaussianProcessRegressor(kernel=_kernel(), optimizer=_best_start, random_state=0)
    mean, sd = process.fit(rows, values).predict(wanted, return_std=True)
    return np.asarray(mean), np.asarray(sd)


def _left_out(rows: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return leave-one-out means and standard deviations in closed form (Rasmussen & Williams 2006, eq. 5.12)."""
    from sklearn.gaussian_process import GaussianProcessRegressor

    kernel = GaussianProcessRegressor(kernel=_kernel(), optimizer=_best_start).fit(rows, values).kernel_
    inverse = np.linalg.inv(kernel(rows) + 1e-8 * np.eye(len(rows)))
    variance = 1.0 / np.diag(inverse)
    return values - (inverse @ values) * variance, np.sqrt(variance)


def _kernel() -> Any:  # scikit-learn has no types
    from sklearn.gaussian_process.kernels import Matern, WhiteKernel

    return 1.0 * Matern(length_scale=1.0, nu=2.5) + WhiteKernel(0.1)


def _best_start(objective: Callable[..., float], start: Floats, bounds: object) -> tuple[Floats, float]:  # noqa: ARG001  # called by name
    """Return the likeliest of a few length scales and noise levels; a gradient search would take longer than the
    rest."""
    grid = [
        np.array([start[0], np.log(length), np.log(noise)])
        for length in (0.3, 0.6, 1.2, 2.5)
        for noise in (0.01, 0.1, 0.3)
    ]
    scored = [(float(objective(theta, eval_gradient=False)), at) for at, theta in enumerate(grid)]
    score, at = min(scored)
    return grid[at], score


def _standard(values: Floats) -> Floats:
    return np.asarray((values - values.mean()) / (values.std() or 1.0))
