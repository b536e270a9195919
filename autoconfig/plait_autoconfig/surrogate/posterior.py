"""What earlier services imply for a new one, on the cells of its space (a `Background`), and what a few trials add to
it: Gaussian processes, averaged over the possible sizes of its parts.

A quantity (log loss, or the margin to the limits) of a service is modelled as

    offset + slope * mean(x) + sum_s c_s * deviations_s(x) + smooth(x) + own(x)

`mean` is what services have in common, `deviations_s` how service s differed from it, `smooth` a Gaussian process
over the knobs, `own` one independent effect per cell. `Scales` holds the typical size of each part. A background may
mislead: `trust` is the prior probability that it helps at all; without it, mean and deviations are zero.

Instead of optimising a single set of scales, a cloud of hypotheses is drawn around the usual ones, drawn again
around those that explain the trials best, and the best few are averaged, weighted by how well they do. Each
hypothesis is a Gaussian process, so everything below is matrix algebra over the whole cloud at once, without
gradients.

Half of the cloud believes the background, half does not. The marginal likelihood of the halves determines the weight
of the background: a misleading library loses its influence after a few trials.

Symbols: n trials, N cells, D features of a cell, S services, P hypotheses, K of them kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.special import ndtr, softmax

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]

FREE_OFFSET_SD = 3.0
"""The standard deviation of a service's level, in units of the typical spread over a space: practically
unconstrained."""
MARGIN_OFFSET_SD = 0.5
"""The same of a margin, where -1 is a failure and 1 is far from every limit."""
SLOPE_SD = 0.3  # spreads of services over the same space differ by about so much
JITTER = 1e-6  # of a variance: what keeps a covariance invertible
_BORDER = 1e100  # more than any squared norm, so that a bordered covariance is positive definite
_STEPS = (0.5, 0.25)  # of the second and third round, in units of the scales' spread
SIZE = 48  # hypotheses of each half in each round
_MANY = 40  # trials, from which on the cloud is thinner: they leave less to average over
_LOST = 0.01  # a half with less weight than this has no say: it would pull by what it alone hopes for
_PER_KEPT = 8  # hypotheses of a round, for each that is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Logarithms of the typical sizes of the parts, `center` (3 + D,), and how far off they may be: `spread`, a
    standard deviation.

    In this order: of the coefficients c_s times sqrt(S); the standard deviations of `smooth` and of `own`; the length
    scales of the smooth part (D,), in units of the encoded features.
    """

    center: Floats
    spread: float


def usual_scales(features: int, *, smooth: float = 1.0, own: float = 0.1, spread: float = 0.9) -> Scales:
    """Return scales of which only the sizes are known, by default without a background. The length scales are half of a
    cube's typical distance.

    The distance of two random points of a D-cube is about sqrt(D / 6); length scales that grow with sqrt(D) keep a
    Gaussian process informative in every dimension (Hvarfner et al., ICML 2024).
    """
    lengths = np.full(features, np.log(0.5 * np.sqrt(max(1, features))))
    return Scales(center=np.concatenate([[0.0, np.log(smooth), np.log(own)], lengths]), spread=spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """The background of one quantity; see the module docstring. `cells` (N, D), `mean` (N,), `deviations` (S, N); S may
    be 0.

    `unit`: how much of the raw quantity one unit of these numbers is. `scales` hold if the background helps, `cold`
    if it does not. `offset_sd`: of the offset.
    """

    cells: Floats
    mean: Floats
    deviations: Floats
    unit: float
    trust: float
    scales: Scales
    cold: Scales
    offset_sd: float = FREE_OFFSET_SD


def no_background(cells: Floats) -> Background:
    """Return the background without a library: a flat mean with no trust."""
    return _flat(cells, 0.0, trust=0.0, scales=usual_scales(cells.shape[1]))


def margin_background(cells: Floats) -> Background:
    """Return the margin's background without a library: four cells in five are feasible, and neighbours are similar."""
    usual = usual_scales(cells.shape[1], smooth=0.5, spread=0.5)
    return _flat(cells, 0.6, trust=1.0, scales=usual, offset_sd=MARGIN_OFFSET_SD)


def _flat(cells: Floats, mean: float, *, trust: float, scales: Scales, offset_sd: float = FREE_OFFSET_SD) -> Background:
    count = len(cells)
    return Background(
        cells=cells, mean=np.full(count, mean), deviations=np.zeros((0, count)), unit=1.0, trust=trust,
        scales=scales, cold=scales, offset_sd=offset_sd,
    )  # fmt: skip


# ---- what trials add -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialData:
    """Trials by cell: `index` (n,) of the cells, `values` (n,) means over `repeats` (n,) trials.

    `noise`: standard deviation of one trial about its cell's true value. Values and noise are in the background's
    unit.
    """

    index: Indices
    values: Floats
    repeats: Floats
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """The posterior. `weights` (K,) of the kept hypotheses; `means` and `sds` (K, N) of the true value of every cell.

    `trust`: the probability by now that the background helps.
    """

    weights: Floats
    means: Floats
    sds: Floats
    trust: float

    def mean(self) -> Floats:
        """Return the mean over all hypotheses (N,)."""
        return self.weights @ self.means


def infer(background: Background, data: TrialData, rng: np.random.Generator) -> Posterior:
    """Return the posterior over all cells. `data` may be empty: then it equals the background."""
    parts = _CovarianceParts(background, data)
    size = max(_PER_KEPT, SIZE * _MANY // max(_MANY, len(data.index)))
    halves = [(True, background.trust, background.scales), (False, 1.0 - background.trust, background.cold)]
    halves = [each for each in halves if each[1] > 0.0]
    firsts = [Hypotheses.drawn(partial(parts.log_evidence, half), prior, size, rng) for half, _, prior in halves]
    shares = softmax(np.array([each.mean_evidence() for each in firsts]) + np.log([odds for _, odds, _ in halves]))
    likely = [at for at, share in enumerate(shares) if share > _LOST]
    kept = [firsts[at].refined(rng) for at in likely]
    pairs = [parts.predict(halves[at][0], theta) for at, each in zip(likely, kept, strict=True) for theta in each.theta]
    weights = np.concatenate([shares[at] * softmax(each.fit) for at, each in zip(likely, kept, strict=True)])
    return Posterior(
        weights=weights / weights.sum(),
        means=np.array([mean for mean, _ in pairs]),
        sds=np.array([sd for _, sd in pairs]),
        trust=float(shares[0]) if background.trust > 0 else 0.0,
    )


def log_evidence(background: Background, data: TrialData, theta: Floats) -> Floats:
    """Return the log marginal likelihood (P,) of the trials under `theta` (P, 3 + D) that believe the background."""
    return _CovarianceParts(background, data).log_evidence(True, theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypotheses:
    """Hypotheses about the scales, `theta` (P, 3 + D) as in `Scales.center`, with their log `evidence` and `fit` (P,).

    `evidence_of` computes it. `fit` is the evidence plus the log `prior` of the hypothesis: the log posterior up to a
    constant.
    """

    evidence_of: Callable[[Floats], Floats]
    prior: Scales
    theta: Floats
    evidence: Floats
    fit: Floats

    @classmethod
    def drawn(
        cls, evidence_of: Callable[[Floats], Floats], prior: Scales, size: int, rng: np.random.Generator
    ) -> Hypotheses:
        """Draw the first round from the prior, whose centre is one of them."""
        noise = rng.standard_normal((size, len(prior.center)))
        noise[0] = 0.0
        return cls._of(evidence_of, prior, prior.center + prior.spread * noise)

    @classmethod
    def _of(cls, evidence_of: Callable[[Floats], Floats], prior: Scales, theta: Floats) -> Hypotheses:
        evidence = evidence_of(theta)
        fit = evidence - 0.5 * (((theta - prior.center) / prior.spread) ** 2).sum(1)
        return cls(evidence_of=evidence_of, prior=prior, theta=theta, evidence=evidence, fit=fit)

    def mean_evidence(self) -> float:
        """Return the log marginal likelihood: the mean over hypotheses drawn from the prior."""
        return float(np.logaddexp.reduce(self.evidence) - np.log(len(self.evidence)))

    def refined(self, rng: np.random.Generator) -> Hypotheses:
        """Return the best few, best first, after two more rounds around the best few."""
        count = len(self.theta)
        best = self._best(count // _PER_KEPT)
        for step in _STEPS:
            parents = best.theta[rng.integers(0, count // _PER_KEPT, count)]
            moved = parents + step * self.prior.spread * rng.standard_normal(parents.shape)
            tried = self._of(self.evidence_of, self.prior, np.concatenate([best.theta, moved]))
            best = tried._best(count // _PER_KEPT)
        return best

    def _best(self, kept: int) -> Hypotheses:
        order = np.argsort(-self.fit, kind="stable")[:kept]
        return replace(self, theta=self.theta[order], evidence=self.evidence[order], fit=self.fit[order])


class _CovarianceParts:
    """The parts of all covariance matrices that do not depend on the hypothesis."""

    def __init__(self, background: Background, data: TrialData) -> None:
        self._background, self._data = background, data
        seen = background.cells[data.index]
        rows, columns = np.tril_indices(len(seen), -1)  # of covariances only the lower triangle is looked at
        self._pairs = rows * len(seen) + columns
        self._squares = (seen[rows] - seen[columns]).T ** 2  # (D, n (n - 1) / 2)
        self._mean = background.mean[data.index]
        self._mixed = background.deviations[:, data.index] / np.sqrt(max(1, len(background.deviations)))
        self._sloped = SLOPE_SD**2 * np.outer(self._mean, self._mean)
        self._mixes = self._mixed.T @ self._mixed

    def log_evidence(self, believes: bool, theta: Floats) -> Floats:
        """Return the log marginal likelihood (P,) of the trials under hypotheses `theta` (P, 3 + D)."""
        count = len(self._data.index)
        bordered = np.empty((len(theta), count + 1, count + 1))  # the last row of its factor is the whitened rest
        bordered[:, :count, :count] = self._covariance(believes, theta)
        bordered[:, count, :count] = self._rest(believes)
        bordered[:, count, count] = _BORDER
        lower = np.linalg.cholesky(bordered)
        white = lower[:, count, :count]
        logdet = np.log(np.diagonal(lower, axis1=1, axis2=2)[:, :count]).sum(1)
        return np.asarray(-0.5 * (white**2).sum(1) - logdet)

    def predict(self, believes: bool, theta: Floats) -> tuple[Floats, Floats]:
        """Return mean and standard deviation (N,) of the true value of every cell under one hypothesis (3 + D,)."""
        back, index = self._background, self._data.index
        mix, smooth, own = np.exp(2.0 * theta[:3])
        scaled = back.cells / np.exp(theta[3:])
        cross = back.offset_sd**2 + smooth * matern_between(scaled, scaled[index])  # (N, n)
        prior = np.full(len(back.mean), back.offset_sd**2 + smooth + own)
        if believes:
            deviations = back.deviations / np.sqrt(max(1, len(back.deviations)))
            cross += SLOPE_SD**2 * np.outer(back.mean, self._mean) + mix * (deviations.T @ self._mixed)
            prior += SLOPE_SD**2 * back.mean**2 + mix * (deviations**2).sum(0)
        cross[index, np.arange(len(index))] += own
        lower = np.linalg.cholesky(self._covariance(believes, theta[None])[0])
        white = solve_triangular(lower, cross.T, lower=True, check_finite=False)  # (n, N)
        mean = white.T @ solve_triangular(lower, self._rest(believes), lower=True, check_finite=False)
        sd = np.sqrt(np.maximum(prior - (white**2).sum(0), 1e-10))
        return (back.mean + mean if believes else mean), sd

    def _rest(self, believes: bool) -> Floats:
        return self._data.values - self._mean if believes else self._data.values

    def _covariance(self, believes: bool, theta: Floats) -> Floats:
        """Return the covariance of the trials (P, n, n): diagonal and lower triangle."""
        count = len(self._data.index)
        mix, smooth, own = np.exp(2.0 * theta[:, :3]).T[:, :, None]
        matrix = np.zeros((len(theta), count, count))
        matrix.reshape(len(theta), -1)[:, self._pairs] = smooth * matern(np.exp(-2.0 * theta[:, 3:]) @ self._squares)
        matrix += self._background.offset_sd**2
        if believes:
            matrix += self._sloped + mix[:, :, None] * self._mixes
        noise = self._data.noise**2 / self._data.repeats + JITTER
        matrix[:, np.arange(count), np.arange(count)] += smooth + own + noise
        return matrix


def expected_improvement(posterior: Posterior, best: Floats) -> Floats:
    """Return how much lower than the best known value each cell is expected to be (N,), over all hypotheses.

    `best` (K,): the best known value under each of them (Mockus 1978; averaged as by Snoek et al., NeurIPS 2012).
    """
    gap = best[:, None] - posterior.means
    z = gap / posterior.sds
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    return np.asarray(posterior.weights @ np.maximum(gap * ndtr(z) + posterior.sds * density, 0.0))


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


_SQRT5 = np.sqrt(5.0)


def matern(squares: Floats) -> Floats:
    """Return the Matern 5/2 covariance of squared distances in length scales (Rasmussen & Williams 2006, eq. 4.17)."""
    scaled = _SQRT5 * np.sqrt(squares)
    return np.asarray((1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled))


def matern_between(left: Floats, right: Floats) -> Floats:
    """Return `matern` between all rows of two matrices (n, D), (m, D), already divided by the length scales: (n, m)."""
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1)[None, :] - 2.0 * (left @ right.T)
    return matern(np.maximum(squares, 0.0))
