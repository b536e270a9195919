"""The values that all parts of the tuner exchange: configurations, outcomes, trials. Frozen, and validated when
created.

A *cell* is one configuration of the space; a *trial* measured one cell once. A failed measurement is a
`FailureKind`, never a made-up number.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Self, TypeAlias

from pydantic import Field

from plait_autoconfig.errors import TunerError

Value: TypeAlias = bool | int | float | str
Config: TypeAlias = Mapping[str, Value]
"""The active knobs of one cell and their values."""

Count: TypeAlias = Annotated[int, Field(ge=0)]
"""Checked where it comes from a file."""

WorkloadFeatures: TypeAlias = Mapping[str, float]
"""Numbers that describe a service and its load, such as `parameters_m` or `mean_candidates`."""


class FailureKind(StrEnum):
    """Why a trial has no metrics. All except `INVALID` are evidence about the configuration."""

    OUT_OF_MEMORY = "out_of_memory"
    CRASH = "crash"
    TIME_OUT = "time_out"
    REFUSED_START = "refused_start"
    INVALID = "invalid"  # the load generator fell behind, or too few samples


@dataclass(slots=True, kw_only=True)
class TrialOutcome:
    """The result of a trial: metrics (finite numbers, units in their names), or why there are none.

    Raises `TunerError` if it has both or neither, or a metric that is NaN or infinite.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: FailureKind | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if bool(self.metrics) == (self.failure is not None):
            raise TunerError("an outcome has either metrics or a failure")
        wrong = [name for name, value in self.metrics.items() if not math.isfinite(value)]
        if wrong:
            msg = f"metric {wrong[0]} is {self.metrics[wrong[0]]}: what was not measured is a failure, not a number"
            raise TunerError(msg)
        self.metrics = {name: float(value) for name, value in self.metrics.items()}

    @classmethod
    def measured(cls, **metrics: float) -> Self:
        """Return the outcome of a trial that ran to completion."""
        return cls(metrics=metrics)

    @classmethod
    def failed(cls, kind: FailureKind, detail: str = "") -> Self:
        """Return the outcome of a trial without a measurement."""
        return cls(failure=kind, detail=detail)

    @property
    def invalid(self) -> bool:
        """Whether the measurement went wrong, so that nothing is known about the configuration."""
        return self.failure is FailureKind.INVALID


@dataclass(slots=True, kw_only=True)
class Trial:
    """One measurement of one configuration. `repeat`: 0 for the first trial of its cell, 1 for the next, ..."""

    number: Count
    config: Config
    outcome: TrialOutcome
    duration_s: float = 0.0
    seed: int = 0
    repeat: Count = 0

    def __post_init__(self) -> None:
        self.config = dict(self.config)
        if not 0.0 <= self.duration_s < math.inf:
            msg = f"trial {self.number}: duration_s is {self.duration_s}, but must be a finite number, at least 0"
            raise TunerError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine that a trial ran on. `accelerator`: a product name such as `H100`; empty if there is none."""

    name: str = ""
    cpus: Count = 0
    memory_bytes: Count = 0
    accelerator: str = ""
    accelerators: Count = 0
    accelerator_memory_bytes: Count = 0
    price_per_hour: float = 0.0

    def features(self) -> dict[str, float]:
        """Return its numbers, for a model to learn from; bytes become GiB."""
        return {
            "hw_cpus": float(self.cpus),
            "hw_memory_gib": self.memory_bytes / 2**30,
            "hw_accelerators": float(self.accelerators),
            "hw_accelerator_memory_gib": self.accelerator_memory_bytes / 2**30,
            "hw_price_per_hour": self.price_per_hour,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSubject:
    """The tuned application, as the library remembers it and designers compare it."""

    service: str = ""
    workload: WorkloadFeatures = field(default_factory=dict)
    hardware: Hardware = field(default_factory=Hardware)
    versions: Mapping[str, str] = field(default_factory=dict)
    costs: tuple[float, ...] = ()
    """What each of `Space.cells()` costs per hour, as far as that is known before it runs (what it reserves); empty
    if unknown. Only the ratios matter; if given, trials should measure `cost_per_hour`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One configuration and the combined results of its trials (`pooled`)."""

    config: Config
    outcome: TrialOutcome
    trials: tuple[Trial, ...]


def pooled(outcomes: Iterable[TrialOutcome]) -> TrialOutcome | None:
    """Combine several outcomes of one cell into one; None if all of them are invalid (or there are none).

    The mean of each metric that all valid ones have. A single failure decides: a configuration that occasionally
    runs out of memory must not be recommended.
    """
    valid = [outcome for outcome in outcomes if not outcome.invalid]
    for outcome in valid:
        if outcome.failure is not None:
            return outcome
    if not valid:
        return None
    names = [name for name in valid[0].metrics if all(name in outcome.metrics for outcome in valid)]
    if not names:
        raise TunerError("the repeats of a trial have no metric in common")
    return TrialOutcome(metrics={name: sum(each.metrics[name] for each in valid) / len(valid) for name in names})


def config_key(config: Config) -> Hashable:
    """Return a key that is equal for equal configurations, whatever the order of their knobs."""
    return tuple(sorted(config.items()))


def cells_of(trials: Iterable[Trial]) -> tuple[Cell, ...]:
    """Return the trials by configuration, in order of first appearance; cells with only invalid trials are left out."""
    groups: dict[Hashable, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(config_key(trial.config), []).append(trial)
    cells = []
    for group in groups.values():
        outcome = pooled(trial.outcome for trial in group)
        if outcome is not None:
            cells.append(Cell(config=group[0].config, outcome=outcome, trials=tuple(group)))
    return tuple(cells)
