"""From trials to numbers: costs and margins, of past services and of the one being tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from plait_autoconfig.objective import ATTAINMENT, COST_PER_HOUR, Limit, Objective
from plait_autoconfig.space import Space
from plait_autoconfig.surrogate.background import Floats
from plait_autoconfig.surrogate.pooling import PastSource
from plait_autoconfig.values import Cell, Hardware, TrialOutcome, WorkloadFeatures


def features_of(workload: WorkloadFeatures, hardware: Hardware) -> dict[str, float]:
    """Return what a model may learn from about a service as a whole."""
    return {**workload, **hardware.features()}


def context_names(past: Sequence[Mapping[str, float]], own: Mapping[str, float]) -> tuple[str, ...]:
    """Return the features that this service and all past ones have, and that differ somewhere."""
    names = sorted(name for name in own if all(name in each for each in past))
    return tuple(name for name in names if len({each[name] for each in past} | {own[name]}) > 1)


def context_row(features: Mapping[str, float], names: Sequence[str]) -> Floats:
    """Return the named features (F,)."""
    return np.array([features[name] for name in names], np.float64)


def log_costs(outcomes: Sequence[TrialOutcome]) -> Floats:
    """Return the logarithms of the hourly cost of the outcomes; NaN where it was not measured."""
    costs = np.array([each.metrics.get(COST_PER_HOUR, np.nan) for each in outcomes], np.float64)
    return np.log(np.where(costs > 0.0, costs, np.nan))


def margins(objective: Objective, outcomes: Sequence[TrialOutcome]) -> Floats:
    """Return how far inside all limits each outcome is, from -1 (failed, or half beyond one) to 1 (half is left)."""
    return np.array(
        [
            -1.0 if each.failure is not None else min((_margin(limit, each) for limit in objective.limits), default=1.0)
            for each in outcomes
        ],
        np.float64,
    )


def _margin(limit: Limit, outcome: TrialOutcome) -> float:
    if limit.metric == ATTAINMENT and limit.bound == "at_least" and 0.0 < limit.value < 1.0:
        # It is what is missing that tells configurations apart: 0.97 is three times too bad for 0.99, and not 2 %.
        missed, allowed = 1.0 - outcome.metrics[ATTAINMENT], 1.0 - limit.value
        return (allowed - missed) / (allowed + missed)
    return float(np.clip(-2.0 * limit.excess(outcome.metrics), -1.0, 1.0))


def source_of(space: Space, cells: Sequence[Cell], values: Floats, context: Floats, weight: float) -> PastSource:
    """Return the cells of a past service for `pool`; those with NaN are left out."""
    known = np.isfinite(values)
    features = space.encode([cell.config for cell, keep in zip(cells, known, strict=True) if keep])
    return PastSource(features=features, values=values[known], context=context, weight=weight)
