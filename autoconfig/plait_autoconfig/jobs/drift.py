"""Drift of the host, seen in the reference configuration, and how it affects a trial's metrics.

A metric is divided by how far the reference's has moved since it was first measured, but only where repeated
references show that it moved: two measurements differ under noise alone. The logarithms of a metric are either noise
about one level or noise about a random walk; the walk counts when its marginal likelihood is `_SHOWN` times that of
noise alone. Both sizes are unknown and averaged over (as Bayes factors: Kass and Raftery, JASA 1995). Noise of
10 % passes for a drift in none of 200 jobs with four references, in 3 with five.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.records import Record
from plait_autoconfig.jobs.spec import Reference
from plait_autoconfig.values import TrialOutcome

_SHOWN = 3.0
_SIZES = np.geomspace(0.01, 0.64, 7)  # of the noise, and of a step of the walk
_LEVEL = 3.0  # the standard deviation of the first level about the mean: practically free


def reference_outcomes(records: Sequence[Record]) -> tuple[tuple[Record, TrialOutcome], ...]:
    """Return the reference measurements of the search that ran, with their raw outcomes."""
    found = [(each, each.raw) for each in records if each.kind is MeasurementKind.REFERENCE]
    return tuple((record, raw) for record, raw in found if raw is not None and raw.failure is None)


def ratios(first: TrialOutcome, later: TrialOutcome) -> dict[str, float]:
    """Return the ratio of later over first by metric; metrics that are not positive in both are left out."""
    return {
        name: later.metrics[name] / value
        for name, value in first.metrics.items()
        if value > 0.0 and later.metrics.get(name, 0.0) > 0.0
    }


def drift_factors(records: Sequence[Record], reference: Reference) -> dict[str, float]:
    """Return, by metric, the divisor for a measurement that ends now; metrics that show no drift are left out."""
    found = reference_outcomes(records)
    fresh = [each for each in records if each.kind is MeasurementKind.CONFIRM and found and each.key == found[0][0].key]
    outcomes = [*(raw for _, raw in found), *(each.raw for each in fresh if each.raw and each.raw.failure is None)]
    if not outcomes:
        return {}
    moved = [ratios(outcomes[0], each) for each in outcomes]
    names = [name for name in moved[0] if all(name in each for each in moved)]
    shifts = {name: _shift(np.log([each[name] for each in moved]), reference.noise) for name in names}
    return {name: float(np.exp(shift)) for name, shift in shifts.items() if shift}


def _shift(seen: NDArray[np.float64], usual: float) -> float:
    """Return how far the level of a series (n,) has moved from its first to its last; 0 unless that is shown."""
    count = len(seen)
    common = np.minimum.outer(np.arange(count), np.arange(count))  # steps that two of them share
    noise, step = (each.ravel() for each in np.meshgrid(_SIZES, np.append(0.0, _SIZES), indexing="ij"))
    matrix = _LEVEL**2 + step[:, None, None] ** 2 * common + noise[:, None, None] ** 2 * np.eye(count)
    rest = seen - seen.mean()
    pull = np.linalg.solve(matrix, np.broadcast_to(rest[:, None], (len(matrix), count, 1)))[:, :, 0]
    evidence = -0.5 * pull @ rest - 0.5 * np.linalg.slogdet(matrix)[1]
    shares = np.exp(evidence - evidence.max()).reshape(len(_SIZES), -1)  # noise by step
    prior = np.exp(-0.5 * np.log(_SIZES / usual) ** 2)
    prior /= prior.sum()
    moved = shares[:, 1:] * np.outer(prior, prior)
    if moved.sum() < _SHOWN * (prior @ shares[:, 0]):
        return 0.0
    shift = (step**2 * (pull @ common[-1])).reshape(len(_SIZES), -1)[:, 1:]
    return float((moved * shift).sum() / moved.sum())


def drift_warnings(records: Sequence[Record], metrics: Sequence[str], reference: Reference) -> tuple[str, ...]:
    """Return a sentence for each of these metrics whose reference once drifted too far to be corrected."""
    outcomes = reference_outcomes(records)
    worst: dict[str, float] = {}
    for _, outcome in outcomes[1:]:
        for name, ratio in ratios(outcomes[0][1], outcome).items():
            worst[name] = max(ratio, worst.get(name, 1.0), key=_change)
    return tuple(_warning(name, worst) for name in metrics if _change(worst.get(name, 1.0)) > reference.most_drift)


def _warning(name: str, worst: Mapping[str, float]) -> str:
    return (
        f"the host drifted: {name} of the reference changed to {worst[name]:.2f} times its first value; "
        "corrected values are only a rough guide"
    )


def _change(ratio: float) -> float:
    """Return the distance from 1, symmetric in both directions: 0.25 for 1.25 and for 0.8."""
    return max(ratio, 1.0 / ratio) - 1.0
