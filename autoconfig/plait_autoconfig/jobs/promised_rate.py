"""The rate that a recommendation promises: offered once more after the confirmation, in runs that chose nothing.

A search for the capacity reports the highest of several rates that held. Near the capacity that is partly the luckiest
run, and a mean of such rates is missed about as often as it is held. So what is recommended is offered the rate that
its measurements reached, in runs of full length with arrivals of their own. A run that misses lowers the rate; one that
held in so many runs in a row is the promise.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.records import Record
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.jobs.state import PromisedRate
from plait_autoconfig.objective import GOODPUT_PER_S
from plait_autoconfig.values import Config, config_key, pooled

SLO_MET = "slo_met"
"""1 where a load at a given rate kept the scenario's SLO, else 0."""

_TIMES = 3
_STEP = 0.9
_MAX_RUNS = 9
"""Three in a row: a rate that is held nine times of ten passes with probability 0.73, one that is held every second
time with 0.12. Nine runs reach down to 0.43 of the first rate."""


@dataclass(frozen=True, slots=True)
class CheckedRate:
    """One run. `held`: the SLO and the limits of the job."""

    rate_per_s: float
    held: bool


def next_rate(first_per_s: float, checks: Sequence[CheckedRate]) -> float | None:
    """Return the rate to offer next; None when one has been held often enough, or nothing more is tried."""
    if not checks:
        return first_per_s
    last = checks[-1]
    if len(checks) >= _MAX_RUNS or _in_a_row(checks) >= _TIMES:
        return None
    return last.rate_per_s if last.held else last.rate_per_s * _STEP


def is_wanted(spec: JobSpec) -> bool:
    """Return whether the job ends with a promise: it searched for the capacity, and measures its best again."""
    return spec.is_capacity_search and len(spec.goal.goals) == 1 and spec.confirm.best > 0


def next_check(spec: JobSpec, records: Sequence[Record], leader: Config) -> float | None:
    """Return the rate to offer what is recommended, at first what it reached afresh; None when that is over."""
    again = [each.raw for each in records if each.kind is MeasurementKind.CONFIRM and each.key == config_key(leader)]
    known = pooled(each for each in again if each is not None)
    reached = 0.0 if known is None else known.metrics.get(GOODPUT_PER_S, 0.0)
    return next_rate(reached, _checks(spec, records, config_key(leader))) if reached > 0.0 else None


def held_rate(spec: JobSpec, records: Sequence[Record], config: Config) -> PromisedRate | None:
    """Return what was found out about the configuration; None if no run was made."""
    checks = _checks(spec, records, config_key(config))
    if not checks:
        return None
    runs = _in_a_row(checks)
    return PromisedRate(
        rate_per_s=checks[-1].rate_per_s if runs >= _TIMES else None,
        runs=runs,
        tried=len(checks),
        lowest_per_s=min(check.rate_per_s for check in checks),
    )


def _checks(spec: JobSpec, records: Sequence[Record], key: Hashable) -> list[CheckedRate]:
    return [
        CheckedRate(record.claim.rate_per_s, holds(spec, record))
        for record in records
        if record.kind is MeasurementKind.CHECK and record.valid and record.key == key
    ]


def holds(spec: JobSpec, record: Record) -> bool:
    """Return whether a check is known to have kept the SLO, and the limits of the job."""
    outcome = record.raw
    return outcome is not None and spec.goal.feasible(outcome) and outcome.metrics.get(SLO_MET, 0.0) > 0.0


def _in_a_row(checks: Sequence[CheckedRate]) -> int:
    """Return how often the last rate was held since it was missed, 0 if the last run missed it."""
    last = itertools.takewhile(lambda each: each.held and each.rate_per_s == checks[-1].rate_per_s, reversed(checks))
    return len(list(last))
