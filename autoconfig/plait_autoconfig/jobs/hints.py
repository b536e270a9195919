"""What a measurement may know of those before it: about how much to expect, and what it has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait_autoconfig.errors import OutsideSpace
from plait_autoconfig.jobs.drift import drift_factors
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.records import Record, config_key, trials_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.objective import GOODPUT_PER_S
from plait_autoconfig.trial_load import expected_rate
from plait_autoconfig.values import Config, cells_of, pooled

__all__ = ["expected_per_s", "to_beat"]

_SEARCHED = (MeasurementKind.TRIAL, MeasurementKind.REFERENCE)


def to_beat(spec: JobSpec, records: Sequence[Record], kind: MeasurementKind) -> float | None:
    """Return what the metric of the only goal would be if the best feasible configuration so far were measured now.

    None for a measurement that is to be complete: a reference, or a confirmation; and while nothing is known.
    """
    if kind is not MeasurementKind.TRIAL or len(spec.goal.goals) > 1:
        return None
    best = spec.goal.best(trials_of(record for record in records if record.kind in _SEARCHED))
    if best is None:
        return None
    metric = spec.goal.goals[0].metric
    return best.outcome.metrics[metric] * drift_factors(records, spec.reference).get(metric, 1.0)


def expected_per_s(spec: JobSpec, records: Sequence[Record], config: Config) -> float:
    """Return the goodput that this configuration, or similar ones, were seen to reach; 0 if none was measured."""
    own = [record.raw for record in records if record.key == config_key(config) and record.kind.compares]
    again = pooled(each for each in own if each is not None and each.failure is None)
    if again is not None:
        return again.metrics.get(GOODPUT_PER_S, 0.0)
    seen = [
        cell
        for cell in cells_of(trials_of(record for record in records if record.kind in _SEARCHED))
        if spec.goal.feasible(cell.outcome)
        and cell.outcome.metrics.get(GOODPUT_PER_S, 0.0) > 0.0
        and _is_inside(spec, cell.config)
    ]
    if not seen:
        return 0.0
    rows = spec.space.encode([config, *(cell.config for cell in seen)])
    return expected_rate(np.abs(rows[1:] - rows[0]).sum(1), [cell.outcome.metrics[GOODPUT_PER_S] for cell in seen])


def _is_inside(spec: JobSpec, config: Config) -> bool:
    try:
        spec.space.check(config)
    except OutsideSpace:
        return False
    return True
