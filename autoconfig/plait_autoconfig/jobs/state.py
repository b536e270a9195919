"""The state of a job at one moment: for `status`, the report, HTTP and the progress bar. Frozen.

Everything here follows from the job and its records (`reporting.state_of`); nothing is stored elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from plait_autoconfig.jobs.measurer import MeasurementKind, Samples
from plait_autoconfig.jobs.records import Status
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.values import Config, TrialOutcome, TuningSubject

Phase: TypeAlias = Literal["searching", "confirming", "waiting", "finished", "failed", "cancelled"]
"""`waiting`: work is left, and nobody does it: the job was not begun yet, or its worker was stopped or killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRow:
    """One measurement. `raw`: as measured; `outcome`: with the drift of the host (`drift`, by metric) divided out.

    `feasible`: it ran and keeps every limit. `reason`: why it was rejected: the failure, the limit and by how much,
    or how much worse than the best it is; of a check, whether its rate held; empty for the best, for references and for
    what is running.
    """

    number: int
    kind: MeasurementKind
    status: Status
    config: Config
    raw: TrialOutcome | None
    outcome: TrialOutcome | None
    drift: Mapping[str, float]
    feasible: bool
    reason: str
    note: str
    worker: str
    started_at_s: float
    duration_s: float
    load_s: float
    samples: Samples
    restarted: tuple[str, ...]
    artefacts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value and its 95 % confidence interval; without `low` and `high` nothing was measured twice."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromisedRate:
    """What was offered to a recommendation after the confirmation. `rate_per_s`: the rate that held in the last `runs`
    in a row, None if none held often enough; `tried`: all runs, down to `lowest_per_s`."""

    rate_per_s: float | None
    runs: int
    tried: int
    lowest_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best feasible configuration so far, by the mean of its `count` measurements. `number`: the first of them.

    `goals`: by metric. `gain`: how many times better than the reference (inverted for lower-is-better goals), by
    metric; empty if one of the two is not positive.
    """

    number: int
    config: Config
    metrics: Mapping[str, float]
    count: int
    goals: Mapping[str, Interval]
    gain: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer of a job. `gain`: times better than the reference, by goal, with its interval; `chance`: the
    probability that it is better.

    `confirmed`: told from measurements made after the search alone, `rounds` of it; the reference's are fresh, too.
    `sentence`: a complete summary. `config` may be the reference itself. `changes`: knob: (reference, recommended).
    `capacity`: the rate per second that it answers in time, if the job searched for that; `promise`: the rate that held
    when it was offered again, None if that was not tried.
    """

    config: Config
    metrics: Mapping[str, float]
    gain: Mapping[str, Interval]
    chance: float | None
    confirmed: bool
    rounds: int
    changes: Mapping[str, tuple[Any, Any]]
    sentence: str
    capacity: Interval | None = None
    promise: PromisedRate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What is left of the budget, and what was used. `seconds`: None without a limit. `load_s`: the part of `used_s`
    that load tests took; 0 if unknown."""

    trials: int
    seconds: float | None
    used_trials: int
    used_s: float
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftPoint:
    """A reference measurement: by metric, its value divided by that of the first reference."""

    number: int
    at_s: float
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The state of a job at one moment. `front`: for several goals (then `best` is None). `answers`: the
    recommendation, or the recommended front; empty before the end, or if nothing is feasible.

    `reason`: why the search stopped, or why the job failed. `binding`: when nothing is feasible, which limit binds
    and by how much. `warnings`: sentences about drift, the library and the like. `cells`: how many configurations
    the space has (`exhaustive`: all of them are listed; otherwise a sample), `tried`: how many were measured.
    """

    spec: JobSpec
    subject: TuningSubject | None
    phase: Phase
    reason: str
    rows: tuple[MeasurementRow, ...]
    best: Best | None
    front: tuple[Best, ...]
    answers: tuple[Recommendation, ...]
    binding: str
    remaining: Remaining
    drift: tuple[DriftPoint, ...]
    warnings: tuple[str, ...]
    workers: tuple[str, ...]
    cells: int
    exhaustive: bool
    tried: int
    best_so_far: tuple[tuple[int, float], ...] = field(default=())
    """(trial number, value of the goal) each time the best changed; only for jobs with a single goal."""

    @property
    def recommendation(self) -> Recommendation | None:
        """The answer of a job with one goal."""
        return self.answers[0] if len(self.answers) == 1 else None

    @property
    def bests(self) -> tuple[Best, ...]:
        """The best so far: one, or with several goals the front."""
        return self.front or (() if self.best is None else (self.best,))
