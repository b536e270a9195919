"""How certain a mean, or a ratio of two means, is when each was measured only a few times.

A residual bootstrap: the relative deviations of all repeated measurements from the mean of their own configuration
form one pool (noise is assumed to be equal in all of them, relative to the value), each scaled by sqrt(n / (n - 1))
because a mean of n lies too close to its own measurements. Means of as many draws as there were measurements show
how the mean scatters. With d = sum(n - 1) degrees of freedom the pool is widened by t(d) / z, Student's factor for a
spread that was itself estimated from few values (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
chapters 9 and 11).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.jobs.state import Interval
from plait_autoconfig.values import Config, TrialOutcome, config_key

CONFIDENCE = 0.95
_DRAWS = 4000

_Floats = NDArray[np.float64]


class Noise:
    """The pool of deviations of one metric. `groups`: for each configuration, the values of all its measurements."""

    def __init__(self, groups: Iterable[Sequence[float]], *, seed: int) -> None:
        self._pool, self._seed = _pool([np.asarray(group, np.float64) for group in groups]), seed

    @classmethod
    def of(cls, metric: str, measured: Iterable[tuple[Config, TrialOutcome | None]], *, seed: int) -> Self:
        """Return the noise of a metric by all outcomes that have it."""
        groups: dict[Hashable, list[float]] = {}
        for config, outcome in measured:
            if outcome is not None and metric in outcome.metrics:
                groups.setdefault(config_key(config), []).append(outcome.metrics[metric])
        return cls(groups.values(), seed=seed)

    @property
    def known(self) -> bool:
        """Whether anything was measured twice."""
        return bool(self._pool.size)

    def mean(self, values: Sequence[float]) -> Interval:
        """Return the mean of these measurements of one configuration, with its interval."""
        middle = float(np.mean(values))
        if not self.known:
            return Interval(value=middle)
        return _interval(middle, middle * self._scatter(len(values), 0))

    def ratio(self, over: Sequence[float], under: Sequence[float]) -> Interval:
        """Return the mean of `over` divided by the mean of `under`, both positive, with its interval."""
        middle = float(np.mean(over) / np.mean(under))
        return _interval(middle, middle * self._ratios(len(over), len(under))) if self.known else Interval(value=middle)

    def chance_above(self, over: Sequence[float], under: Sequence[float]) -> float | None:
        """Return the probability that the mean of `over` is really the larger; None if nothing was measured twice."""
        if not self.known:
            return None
        middle = float(np.mean(over) / np.mean(under))
        return float(np.mean(middle * self._ratios(len(over), len(under)) > 1.0))

    def _ratios(self, over: int, under: int) -> _Floats:
        """Return what a ratio of 1 is measured as (draws,)."""
        return self._scatter(over, 1) / np.maximum(self._scatter(under, 2), 1e-9)

    def _scatter(self, count: int, stream: int) -> _Floats:
        """Return what a mean of 1, of that many measurements, is measured as (draws,)."""
        rng = np.random.default_rng((self._seed, stream))
        means: _Floats = rng.choice(self._pool, size=(_DRAWS, count)).mean(axis=1)
        return 1.0 + means


def _pool(groups: Sequence[_Floats]) -> _Floats:
    """Return relative deviations (N,), mean 0, widened because they are few; empty if no group has two values."""
    parts: list[_Floats] = []
    freedom = 0
    for group in groups:
        mean = float(group.mean()) if group.size else 0.0
        if group.size >= 2 and mean != 0.0:
            parts.append((group / mean - 1.0) * np.sqrt(group.size / (group.size - 1)))
            freedom += group.size - 1
    if not parts:
        return np.empty(0)
    from scipy.special import ndtri, stdtrit  # scipy.stats takes a second to import

    share = (1.0 + CONFIDENCE) / 2.0
    return np.concatenate(parts) * float(stdtrit(freedom, share) / ndtri(share))


def _interval(value: float, draws: _Floats) -> Interval:
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(draws, [tail, 100.0 - tail])
    return Interval(value=value, low=float(low), high=float(high))
