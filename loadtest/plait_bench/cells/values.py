"""A workload whose configurations are measured, and what is measured of each."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, TrialOutcome

__all__ = ["CellSubject", "CellWorkload", "outcome_of"]


class CellSubject(Protocol):
    """A running service whose knobs can be set."""

    def measure(self, config: Config, *, seed: int) -> TrialOutcome:
        """Run one short trial: a closed loop of callers, with the same requests for every configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellWorkload(ABC):
    """A service and its load. `slo_ms`: the latency within which an answer is in time; `sets` says what
    the knobs set and `features` describe both (`LibraryRun`). `slow_knob`: one whose change costs much, if any."""

    name: str
    service: str
    space: Space
    sets: Mapping[str, str]
    slo_ms: float
    features: Mapping[str, float]
    slow_knob: str = ""

    @abstractmethod
    def open(self) -> AbstractContextManager[CellSubject]:
        """Open the service, warm."""


def outcome_of(latencies_ms: Sequence[float], wall_s: float, *, slo_ms: float, cores: float) -> TrialOutcome:
    """Compute the metrics of a trial, under the names that a tuning job uses. `cores` are paid for, 1 an hour each.

    The p99 of a few dozen requests is about their largest: short trials are noisy, and their repeats show it.
    """
    in_time = sum(latency <= slo_ms for latency in latencies_ms)
    goodput_per_s = in_time / wall_s
    return TrialOutcome.measured(
        goodput_per_s=goodput_per_s,
        attainment=in_time / len(latencies_ms),
        error_rate=0.0,  # a request that fails ends the measurement
        achieved_per_s=len(latencies_ms) / wall_s,
        p50_ms=statistics.median(latencies_ms),
        p99_ms=statistics.quantiles(latencies_ms, n=100, method="inclusive")[98],
        cost_per_hour=cores,
        goodput_per_cost=goodput_per_s / cores,
    )
