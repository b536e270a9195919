"""Jobs over the made-up service of `fakes.measurer`, and a runner without a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fakes.measurer import fake_measurer
from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.loop import run_job
from plait_autoconfig.jobs.measurer import (
    Measured,
    MeasurementKind,
    MeasurementTask,
    Measurer,
    MeasurerSource,
    Say,
    TuningSubject,
)
from plait_autoconfig.jobs.records import Claim, Record
from plait_autoconfig.jobs.runner import Tick
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.jobs.state import JobState
from plait_autoconfig.jobs.store import JobStore
from plait_autoconfig.values import Config, TrialOutcome

JOB: dict[str, Any] = {
    "name": "demo",
    "knobs": {
        "replicas": {"kind": "int", "low": 1, "high": 4, "sets": "engine.replicas"},
        "batch": {"kind": "choice", "values": [1, 2, 4, 8], "ordered": True, "sets": "engine.largest_batch"},
    },
    "constraints": ["replicas * batch <= 16"],
    "scenarios": [{"target": {"api": "raw"}, "arrivals": {"kind": "poisson", "rate_per_s": 3.0}, "mix": [{}]}],
    "reference": {"config": {"replicas": 1, "batch": 4}, "every": 3},
    "designer": {"name": "random"},
    "budget": {"trials": 6},
}


def job_text(**changes: Any) -> str:
    """The job file with other settings."""
    return yaml.safe_dump({**JOB, **changes}, sort_keys=False)


def job(**changes: Any) -> JobSpec:
    """The job with other settings."""
    return parse_job(job_text(**changes), folder=Path("/"))


class DirectRunner:
    """Measures in this process; failures that need a process of their own are not for it."""

    def __init__(self, measurer: Measurer, spec: JobSpec) -> None:
        self.measurer, self.spec, self.finished = measurer, spec, 0

    def check(self, tick: Tick) -> TuningSubject:
        """See `Runner.check`."""
        return self.measurer.check(self.spec)

    def measure(self, task: MeasurementTask, say: Say, tick: Tick) -> Measured:
        """See `Runner.measure`."""

        def say_and_tick(text: str) -> None:
            tick()
            say(text)

        return self.measurer.measure(task, say_and_tick)

    def apply(self, config: Config) -> None:
        """See `Runner.apply`."""
        self.measurer.apply(config)

    def finish(self) -> None:
        """See `Runner.finish`."""
        self.finished += 1


def run_directly(folder: Path, spec: JobSpec, **arguments: Any) -> JobState:
    """Runs a job to its end without a measuring process; ``arguments`` are the fake measurer's."""
    store = JobStore.open_or_create(folder, spec)
    runner = DirectRunner(fake_measurer(folder=folder, **arguments), spec)
    return run_job(store, fake_source(), runner=runner)


def fake_source(**arguments: Any) -> MeasurerSource:
    """The fake measurer in a process of its own."""
    return MeasurerSource(factory="fakes.measurer:fake_measurer", arguments=arguments)


def record(
    number: int,
    config: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    *,
    kind: MeasurementKind = MeasurementKind.TRIAL,
    outcome: TrialOutcome | None = None,
    running: bool = False,
    duration_s: float = 1.0,
    rate_per_s: float = 0.0,
) -> Record:
    """A measurement that ended, with these metrics or this outcome; or one that is running."""
    claim = Claim(
        kind=kind, config=config, seed=0, worker="w", nonce=f"n{number}", at_s=float(number), rate_per_s=rate_per_s
    )
    if running:
        return Record(number=number, claim=claim)
    ended = outcome or TrialOutcome(metrics=dict(metrics or {}))
    return Record(number=number, claim=claim, measured=Measured(outcome=ended, duration_s=duration_s))
