"""Distributions that requests are drawn from: weighted choice, Zipf's law over n items, MLPerf's candidate counts.

Every draw is a function of uniforms in [0, 1) or of a numpy Generator that the caller owns. Legend: n items, rank k
= 1..n, exponent s: item k has weight k^-s; `cumulative` is float64 (n,), ascending, its last entry 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Drawn = TypeVar("Drawn")

MLPERF_CANDIDATES: dict[int, float] = {100: 2, 200: 12, 300: 2, 400: 1, 500: 1, 600: 1, 700: 1}
"""User-item pairs per query of MLPerf's DLRM (mean 270): mlcommons/inference, recommendation/dlrm_v2/pytorch,
tools/dist_quantile.txt at commit b66003e: twenty quantiles, each equally likely."""


def cumulative(weights: Sequence[float] | Floats) -> Floats:
    """Return the cumulative shares of `weights`, of which none is negative and one is positive."""
    sums = np.cumsum(weights, dtype=np.float64)
    sums /= sums[-1]
    return sums


def zipf_weights(count: int, exponent: float) -> Floats:
    """Return the weights of ranks 1..count: float64 (count,). With exponent 0 all are equal."""
    return np.arange(1, count + 1, dtype=np.float64) ** -exponent


def pick(sums: Floats, uniforms: Floats) -> Ints:
    """Return the item index for each uniform (inverse of the cumulative). An item of weight 0 is never picked."""
    return np.searchsorted(sums, uniforms, side="right").astype(np.int64)


class WeightedChoice(Generic[Drawn]):
    """Weighted choice: values and their cumulative weights."""

    def __init__(self, weights: Mapping[Drawn, float]) -> None:
        self._values = list(weights)
        self._sums = cumulative(list(weights.values()))

    def pick(self, uniforms: Floats) -> list[Drawn]:
        """Return a value for each uniform."""
        return [self._values[index] for index in pick(self._sums, uniforms).tolist()]


def pick_texts(texts: Sequence[str], uniforms: Floats) -> list[str]:
    """Return one of `texts` for each uniform, all equally likely."""
    return [texts[index] for index in (uniforms * len(texts)).astype(np.int64).tolist()]


def pick_distinct(sums: Sequence[float], uniforms: Sequence[float]) -> tuple[int, ...]:
    """Return one index per uniform, all different: each is drawn by weight from those that are left.

    `sums` is a cumulative as a list (bisect on a list is faster than numpy for one number). As many items as
    `uniforms` must have a positive weight.
    """
    chosen: list[int] = []
    for uniform in uniforms:
        left = sums[-1] - sum(_weight(sums, index) for index in chosen)
        target = uniform * left
        for index in sorted(chosen):  # step over the mass that was taken before
            if target >= _below(sums, index):
                target += _weight(sums, index)
        chosen.append(_free_index(sums, target, chosen))
    return tuple(chosen)


def _below(sums: Sequence[float], index: int) -> float:
    return sums[index - 1] if index else 0.0


def _weight(sums: Sequence[float], index: int) -> float:
    return sums[index] - _below(sums, index)


def _free_index(sums: Sequence[float], target: float, taken: Sequence[int]) -> int:
    """Return the item at `target`, or the nearest free one: rounding can hit a neighbour that is taken, or the end."""
    index = min(bisect_right(sums, target), len(sums) - 1)
    if index not in taken and _weight(sums, index) > 0:
        return index
    free = [other for other in range(len(sums)) if other not in taken and _weight(sums, other) > 0]
    return min(free, key=lambda other: abs(other - index))


_MAX_SUMS = 1 << 16
"""The ranks up to which one column is looked up in a table of sums: for the 100 candidates of a request a fifth of the
time."""


class ZipfRanks:
    """Zipf's law over exactly n ranks; many columns, or many ranks, without a table of n entries, so n may be 10^8 and
    more.

    Rejection-inversion: W. Hoermann, G. Derflinger, "Rejection-inversion to generate variates from monotone discrete
    distributions", ACM TOMACS 6(3), 1996; about 1.1 uniforms per variate. Symbols as there: x under the hat k^-s
    over [k - 1/2, k + 1/2], its area from 1 to x.
    """

    def __init__(self, rows: npt.NDArray[np.int64], exponent: float) -> None:
        """Set up the columns. `rows` int64 (I,): n of each column of `draw`, at least 1; `exponent` at least 0."""
        self._rows = rows
        self._exponent = exponent
        self._start = float(_area(np.float64(1.5), exponent)) - 1.0
        self._stops = _area(rows.astype(np.float64) + 0.5, exponent)
        # Ranks that lie this near to x are accepted without computing the area.
        edge = _area(np.float64(2.5), exponent) - 2.0**-exponent
        self._squeeze = 2.0 - float(_inverse_area(edge, exponent))
        self._sums: Floats | None = None
        if rows.size == 1 and rows[0] <= _MAX_SUMS:
            self._sums = cumulative(zipf_weights(int(rows[0]), exponent))[:-1]  # the last rank has what is left

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Return ranks from 0, the most popular: int64 (count, I)."""
        shape = (count, self._rows.size)
        if self._exponent == 0:
            return rng.integers(0, self._rows, shape)
        if self._sums is not None:
            return np.searchsorted(self._sums, rng.random(shape), side="right").astype(np.int64, copy=False)
        rows: Ints = np.broadcast_to(self._rows, shape).reshape(-1)
        stops: Floats = np.broadcast_to(self._stops, shape).reshape(-1)
        ranks = np.empty(rows.size, dtype=np.int64)
        waiting = np.arange(rows.size)
        while waiting.size:
            rank, accepted = self._try(rng, rows, stops)
            ranks[waiting[accepted]] = rank[accepted].astype(np.int64) - 1
            again = ~accepted
            waiting, rows, stops = waiting[again], rows[again], stops[again]
        return ranks.reshape(shape)

    def _try(self, rng: np.random.Generator, rows: Ints, stops: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return one proposal for each entry, and whether it is accepted."""
        area = stops + rng.random(stops.size) * (self._start - stops)
        x = _inverse_area(area, self._exponent)
        rank = np.clip(np.floor(x + 0.5), 1, rows)
        accepted = rank - x <= self._squeeze
        unsure = np.flatnonzero(~accepted)
        bound = _area(rank[unsure] + 0.5, self._exponent) - rank[unsure] ** -self._exponent
        accepted[unsure] = area[unsure] >= bound
        return rank, accepted


_NEARLY_ONE = 1e-3  # closer to exponent 1 the closed forms lose digits to cancellation


def _area(x: Floats | np.float64, exponent: float) -> Floats:
    """Return the integral of t^-s from 1 to x: (x^(1-s) - 1) / (1 - s), or log x for s = 1; accurate near s = 1."""
    bend = 1.0 - exponent
    if abs(bend) > _NEARLY_ONE:  # numpy has exp and log in vector instructions, expm1 and log1p not
        return np.asarray((np.exp(bend * np.log(x)) - 1.0) / bend)
    return np.asarray(np.log(x) * _ratio(np.expm1(bend * np.log(x)), bend * np.log(x)))


def _inverse_area(area: Floats, exponent: float) -> Floats:
    """Return the x whose `_area` is `area`."""
    bend = 1.0 - exponent
    inner = np.maximum(bend * area, -1.0 + 1e-15)
    if abs(bend) > _NEARLY_ONE:
        return np.asarray(np.exp(np.log(1.0 + inner) / bend))
    return np.asarray(np.exp(area * _ratio(np.log1p(inner), inner)))


def _ratio(above: Floats, below: Floats) -> Floats:
    """Return above / below for two quantities that both go to 0 with ratio 1."""
    small = np.abs(below) < 1e-12
    return np.where(small, 1.0, above / np.where(small, 1.0, below))
