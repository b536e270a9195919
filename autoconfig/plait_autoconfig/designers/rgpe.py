"""RGPE: an ensemble of one Gaussian process per past service and one of the new one, weighted by how well they rank.

Feurer, Letham, Bakshy, "Scalable meta-learning for Bayesian optimization using ranking-weighted Gaussian process
ensembles" (arXiv 1802.02219): weights are the shares of posterior draws in which a model ranks the new service's
trials with the fewest mistakes (the new model by leave-one-out), and a model that is mostly worse than the new one
is dropped (section 4.3). Source processes see every measured cell up to `_POINTS`. Symbols: N cells, n trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular
from scipy.special import ndtr

from plait_autoconfig.designers.base import CellDesigner
from plait_autoconfig.designers.protocols import ServiceContext
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.surrogate import reading
from plait_autoconfig.surrogate.kernels import matern_between
from plait_autoconfig.surrogate.threads import one_thread
from plait_autoconfig.values import Cell

_POINTS, _DRAWS = 1500, 128
_CHOSEN_ON = 300  # rows that length scale and noise are chosen on
_LENGTHS, _NOISES = (0.3, 0.6, 1.2, 2.5), (0.01, 0.1, 0.3)

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
            losses = self._punished(past.cells)
            some = rng.permutation(len(losses))[:_POINTS]
            rows = self.space.encode([past.cells[at].config for at in some])
            mean, sd = _Fitted.of(rows, _standard(losses[some])).predict(self.features)
            means.append(mean)
            sds.append(sd)
        shape = (len(means), len(self.cells))
        return Ensemble(np.reshape(means, shape), np.reshape(sds, shape))

    def _choose(self, open_cells: NDArray[np.intp]) -> int:
        with one_thread():
            return self._most_promising(open_cells)

    def _most_promising(self, open_cells: NDArray[np.intp]) -> int:
        known = [(at, cell) for cell in self.observed() if (at := self.index_of(cell.config)) is not None]
        seen = np.array([at for at, _ in known], np.intp)
        past = self.ensemble
        if not seen.size:
            if not len(past.means):
                return int(self.rng.choice(open_cells))
            return int(open_cells[past.means.mean(0)[open_cells].argmin()])
        feasible = np.array([self.objective.feasible(cell.outcome) for _, cell in known])
        values = _standard(self._punished([cell for _, cell in known]))
        own = _Fitted.of(self.features[seen], values)
        own_mean, own_sd = own.predict(self.features)
        weights = self._weights(past, seen, values, own)
        mean = weights @ np.vstack([past.means, own_mean])
        sd = np.sqrt(weights**2 @ np.vstack([past.sds, own_sd]) ** 2)
        best = mean[seen[feasible]].min() if feasible.any() else float(np.median(mean))
        z = (best - mean) / np.maximum(sd, 1e-9)
        gain = (best - mean) * ndtr(z) + sd * np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
        return int(open_cells[gain[open_cells].argmax()])

    def _punished(self, cells: Sequence[Cell]) -> Floats:
        """Return log losses (n,); what is infeasible counts as one spread worse than the worst that is not."""
        losses = reading.log_losses(self._goal, [cell.outcome for cell in cells])
        feasible = np.array([self.objective.feasible(cell.outcome) for cell in cells], bool)
        worst = losses[feasible].max() + (losses[feasible].std() or 1.0) if feasible.any() else 0.0
        return np.where(feasible, losses, worst)

    def _weights(self, past: Ensemble, seen: NDArray[np.intp], values: Floats, own: _Fitted) -> Floats:
        """Return the ensemble weights (S + 1,), the last for the new service's own process."""
        sources = len(past.means)
        if len(seen) < 3 or not sources:
            return np.full(sources + 1, 1.0 / max(1, sources)) * (np.arange(sources + 1) < max(1, sources))
        normal = self.rng.standard_normal((sources + 1, _DRAWS, len(seen)))
        own_mean, own_sd = own.left_out()
        means = np.vstack([past.means[:, seen], own_mean])
        sds = np.vstack([past.sds[:, seen], own_sd])
        drawn = means[:, None, :] + sds[:, None, :] * normal
        order = values[:, None] < values[None, :]
        mistakes = ((drawn[..., :, None] < drawn[..., None, :]) != order).sum((2, 3)).astype(float)  # (S + 1, draws)
        dropped = np.median(mistakes[:-1], axis=1) > np.quantile(mistakes[-1], 0.95)
        mistakes[:-1][dropped] = np.inf
        ties = mistakes == mistakes.min(0)
        return np.asarray((ties / ties.sum(0)).mean(1))


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A Gaussian process (variance 1, Matern 5/2) with its likeliest length scale and noise variance."""

    rows: Floats
    values: Floats
    length: float
    noise: float

    @classmethod
    def of(cls, rows: Floats, values: Floats) -> _Fitted:
        """Choose both on at most `_CHOSEN_ON` of the rows (n, D); a gradient search would take longer than the rest."""
        step = max(1, -(-len(rows) // _CHOSEN_ON))
        few, theirs = rows[::step], values[::step]
        scored = []
        for length in _LENGTHS:
            smooth = matern_between(few / length, few / length)
            for noise in _NOISES:
                lower = cholesky(smooth + noise * np.eye(len(few)), lower=True, check_finite=False)
                white = solve_triangular(lower, theirs, lower=True, check_finite=False)
                scored.append((-0.5 * float(white @ white) - float(np.log(np.diag(lower)).sum()), length, noise))
        _, length, noise = max(scored)
        return cls(rows, values, length, noise)

    def covariance(self) -> Floats:
        """Return the covariance of the values (n, n), noise included."""
        smooth = matern_between(self.rows / self.length, self.rows / self.length)
        return np.asarray(smooth + self.noise * np.eye(len(self.rows)))

    def predict(self, wanted: Floats) -> tuple[Floats, Floats]:
        """Return mean and standard deviation, noise included, at other rows (N,)."""
        lower = cholesky(self.covariance(), lower=True, check_finite=False)
        cross = matern_between(wanted / self.length, self.rows / self.length)
        white = solve_triangular(lower, cross.T, lower=True, check_finite=False)
        mean = white.T @ solve_triangular(lower, self.values, lower=True, check_finite=False)
        return np.asarray(mean), np.sqrt(np.maximum(1.0 + self.noise - (white**2).sum(0), 1e-10))

    def left_out(self) -> tuple[Floats, Floats]:
        """Return leave-one-out means and standard deviations in closed form (Rasmussen & Williams 2006, eq. 5.12)."""
        inverse = np.linalg.inv(self.covariance())
        variance = 1.0 / np.diag(inverse)
        return self.values - (inverse @ self.values) * variance, np.sqrt(variance)


def _standard(values: Floats) -> Floats:
    return np.asarray((values - values.mean()) / (values.std() or 1.0))
