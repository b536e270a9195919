"""Drift of the host, seen in the reference configuration, and how it affects a trial's metrics.

Legend: x(t) is a metric of the reference measured at t, x(0) its first value. The factor is x(t) / x(0) for the
latest t. A trial's metric is divided by it. A factor within the noise counts as 1, so that the reference's noise is
not added to every trial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.records import Record
from plait_autoconfig.jobs.spec import Reference
from plait_autoconfig.values import TrialOutcome


def reference_outcomes(records: Sequence[Record]) -> tuple[tuple[Record, TrialOutcome], ...]:
    """Return the reference measurements that ran, with their raw outcomes."""
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
    """Return, by metric, the divisor for a trial that ends now; metrics without drift beyond the noise are left out."""
    outcomes = [outcome for _, outcome in reference_outcomes(records)]
    if not outcomes:
        return {}
    found = ratios(outcomes[0], outcomes[-1])
    return {name: ratio for name, ratio in found.items() if _change(ratio) > reference.noise}


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
