"""What a job stores: its measurements, claimed by a worker, then finished or lost, and what else is known. Frozen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from plait_autoconfig.jobs.measurer import Measured, MeasurementKind
from plait_autoconfig.values import Config, FailureKind, Trial, TrialOutcome, TuningSubject, config_key

Status: TypeAlias = Literal["running", "finished", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A measurement claimed by a worker. `nonce` is unique to the claim; times are seconds since 1970. `rate_per_s`: as
    in `MeasurementTask`."""

    kind: MeasurementKind
    config: Config
    seed: int
    worker: str
    nonce: str
    at_s: float
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A claim and its result. `number`: counts all measurements of the job, from 0.

    `measured` has the raw outcome, `drift` the factors by which the host had drifted by then, by metric (1 where
    absent); None while running or when lost. `lost`: why nobody finished it.
    """

    number: int
    claim: Claim
    measured: Measured | None = None
    drift: Mapping[str, float] = field(default_factory=dict)
    lost: str = ""

    @property
    def status(self) -> Status:
        """Running, finished or lost."""
        if self.measured is not None:
            return "finished"
        return "lost" if self.lost else "running"

    @property
    def kind(self) -> MeasurementKind:
        """The purpose of the measurement."""
        return self.claim.kind

    @property
    def config(self) -> Config:
        """The measured configuration."""
        return self.claim.config

    @property
    def key(self) -> Hashable:
        """Equal for equal configurations."""
        return config_key(self.claim.config)

    @property
    def raw(self) -> TrialOutcome | None:
        """The outcome as measured; None if it did not finish."""
        return None if self.measured is None else self.measured.outcome

    @property
    def outcome(self) -> TrialOutcome | None:
        """The outcome with the drift of the host divided out; None if it did not finish."""
        if self.measured is None or self.measured.outcome.failure is not None or not self.drift:
            return self.raw
        metrics = self.measured.outcome.metrics
        return TrialOutcome(metrics={name: value / self.drift.get(name, 1.0) for name, value in metrics.items()})

    @property
    def valid(self) -> bool:
        """Whether it finished and is evidence about the configuration."""
        return self.measured is not None and not self.measured.outcome.invalid

    def trial(self) -> Trial | None:
        """Return the trial as designers and the library see it, drift divided out; None if it did not finish."""
        if self.measured is None or self.outcome is None:
            return None
        return Trial(
            number=self.number,
            config=self.config,
            outcome=self.outcome,
            duration_s=self.measured.duration_s,
            seed=self.claim.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What is known of a job besides its measurements. `subject`: None before a measurer has reported it. `warnings`:
    about the whole job, as sentences. `exhausted`: why the designer ends the search; empty if it does not, or was not
    asked yet.

    How the job ended since it was last started: `cancelled`; `failure`: why the last worker failed; `done`: why a
    worker found nothing left to do (a budget of minutes counts more time than the measurements took).
    """

    subject: TuningSubject | None = None
    warnings: tuple[str, ...] = ()
    exhausted: str = ""
    cancelled: bool = False
    failure: str = ""
    done: str = ""


def trials_of(records: Iterable[Record]) -> tuple[Trial, ...]:
    """Return the finished records as trials (warm-ups and checks left out), with `repeat` counted per configuration."""
    seen: Counter[Hashable] = Counter()
    trials = []
    for record in records:
        trial = record.trial() if record.kind.compares else None
        if trial is not None:
            trials.append(replace(trial, repeat=seen[record.key]))
            seen[record.key] += 1
    return tuple(trials)


def searched_trials(records: Iterable[Record]) -> tuple[Trial, ...]:
    """Return the measurements of the search, those of the reference included."""
    kinds = (MeasurementKind.TRIAL, MeasurementKind.REFERENCE)
    return trials_of(record for record in records if record.kind in kinds)


def fresh_trials(records: Iterable[Record]) -> tuple[Trial, ...]:
    """Return the measurements of the confirmation."""
    return trials_of(record for record in records if record.kind is MeasurementKind.CONFIRM)


GONE = "its worker was gone"


def given_up(record: Record) -> Record:
    """Return a measurement of a worker that is not alive any more as a lost one, if it was not over."""
    return replace(record, lost=GONE) if record.status == "running" else record


def lost_as_crash(record: Record) -> Record:
    """Return a lost measurement as a crashed one: for a configuration that killed its worker repeatedly."""
    outcome = TrialOutcome.failed(FailureKind.CRASH, f"the tuner itself died while measuring it: {record.lost}")
    return replace(record, measured=Measured(outcome=outcome), lost="")
