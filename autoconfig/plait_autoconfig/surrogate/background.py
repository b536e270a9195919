"""What earlier services imply for a new one, on the cells of its space. Pure numpy; one `Background` per quantity.

A quantity (log loss, or the margin to the limits) of a service is modelled as

    offset + slope * mean(x) + sum_s c_s * deviations_s(x) + smooth(x) + own(x)

`mean` is what services have in common, `deviations_s` how service s differed from it, `smooth` a Gaussian process
over the knobs, `own` one independent effect per cell. `Scales` holds the typical size of each part. A background may
mislead: `trust` is the prior probability that it helps at all; without it, mean and deviations are zero.

Symbols: N cells, D features of a cell, S services.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]

FREE_OFFSET_SD = 3.0
"""The standard deviation of a service's level, in units of the typical spread over a space: practically
unconstrained."""
MARGIN_OFFSET_SD = 0.5
"""The same of a margin, where -1 is a failure and 1 is far from every limit."""


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
