"""Jobs played to their end in memory: what the plan asks for is answered by the made-up service, with noise."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from fakes.measurer import service, settings_of
from plait_autoconfig.jobs.measurer import MeasurementKind, Samples
from plait_autoconfig.jobs.plan import RunMeasurement, RunSearch, next_step
from plait_autoconfig.jobs.promised_rate import SLO_MET
from plait_autoconfig.jobs.records import JobFacts, Record
from plait_autoconfig.jobs.reporting import state_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.jobs.state import JobState
from plait_autoconfig.values import Config, FailureKind, Hardware, TrialOutcome, TuningSubject
from support.tune_jobs import job, record

SUBJECT = TuningSubject(
    service="made up",
    workload={"rate_per_s": 3.0},
    hardware=Hardware(name="a test's machine", cpus=2, memory_bytes=8 << 30),
    versions={"plait": "0.1.0"},
)
FAILED = {kind.value: TrialOutcome.failed(kind, "as the test wants it") for kind in FailureKind}


def played(
    spec: JobSpec | None = None, *, fail: Mapping[str, str] | None = None, most: int = 10_000, noise: float = 0.02
) -> JobState:
    """The state of a job after at most so many measurements; configurations are tried in a shuffled order. ``fail``:
    ``knob=value`` to the kind of failure."""
    spec = spec or job()
    rng, records = random.Random(5), []
    waiting = [cell for cell in spec.space.cells() if cell != spec.default]
    rng.shuffle(waiting)
    while len(records) < most:
        step = next_step(spec, records)
        if isinstance(step, RunMeasurement):
            kind, config = step.kind, step.config
        elif isinstance(step, RunSearch):
            kind, config = MeasurementKind.TRIAL, waiting.pop()
        else:
            break
        records.append(_record(len(records), kind, config, _outcome(config, rng, fail or {}, noise)))
    return state_of(spec, records, JobFacts(subject=SUBJECT))


def _outcome(config: Config, rng: random.Random, fail: Mapping[str, str], noise: float) -> TrialOutcome:
    found = next((kind for setting, kind in fail.items() if setting in settings_of(config)), None)
    if found is not None:
        return FAILED[found]
    metrics = {name: value * rng.gauss(1.0, noise) for name, value in service(config).items()}
    return TrialOutcome(metrics={**metrics, "cost_per_hour": service(config)["cost_per_hour"], SLO_MET: 1.0})


def _record(number: int, kind: MeasurementKind, config: Config, outcome: TrialOutcome) -> Record:
    made = record(number, config, kind=kind, outcome=outcome, duration_s=20.0)
    claim = replace(made.claim, at_s=1_790_000_000.0 + 25.0 * number)
    used = Samples(cpu_cores=1.5, memory_bytes=3 << 30)
    return replace(made, claim=claim, measured=replace(made.measured, samples=used))
