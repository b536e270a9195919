"""The measurer of `plait_autoconfig.jobs` for all that answers over HTTP: plait's own applications and any service.

Metrics of a trial: those of `load`, and `cpu_cores` (busy, mean), `memory_gib` (maximum), `cost_per_hour` (`cost`),
`goodput_per_cost` (responses in time per unit of money); if the job asks for it, `quality_drift` (`quality`).
"""

from __future__ import annotations

import logging
import os
import platform
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from plait.errors import PlaitError
from plait.server.state import state_root
from plait.tuning.measure.application import NotReady, RefusedStart, compose_of
from plait.tuning.measure.plait_subject import PlaitSubject
from plait.tuning.measure.quality import QUALITY_DRIFT, NoAnswer, quality_drift
from plait.tuning.measure.service_subject import ServiceSubject
from plait.tuning.measure.trial import Subject, run_loads, with_address
from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.exit_status import count_oom_kills, mentions_out_of_memory
from plait_autoconfig.jobs.measurer import Measured, MeasurementTask, Say
from plait_autoconfig.jobs.spec import JobSpec, ServiceTarget
from plait_autoconfig.values import Config, FailureKind, Hardware, TrialOutcome, TuningSubject
from plait_kernels.cores import usable_cores

_SPARE_S = 5.0
"""The part of a trial's time reserved for what follows the load, so that we end the trial before our parent does."""


class PlaitMeasurer:
    """The `plait_autoconfig.jobs.measurer.Measurer` for all that answers over HTTP."""

    def __init__(self, *, folder: Path, live: bool = False, commands: bool = False, compose: str = "") -> None:
        """`live`: the command allowed it. `commands`: the job may name some, for it is its user's. `compose`:
        `module:function` that makes the Serve application of a configuration, in place of plait's own."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._folder, self._root, self._compose = folder, state_root(os.environ), compose_of(compose)
        self._may_be_live, self._may_run_commands = live, commands
        self._subject: Subject | None = None

    def check(self, spec: JobSpec) -> TuningSubject:
        """Refuse what cannot be measured; then start the clone's Ray, or attach to the live service."""
        if not isinstance(spec.target, ServiceTarget):
            if spec.target.live and not self._may_be_live:
                raise JobRefused("target.live: the service that users are on is only tuned with the flag --live")
            self._subject = PlaitSubject(spec, spec.target, compose=self._compose, root=self._root, folder=self._folder)
        elif self._may_run_commands:
            self._subject = ServiceSubject(spec, spec.target, root=self._root, folder=self._folder)
        else:
            raise JobRefused("target: commands are run for the jobs of `plait tune run` only")
        return _described(self._subject)

    def measure(self, task: MeasurementTask, say: Say) -> Measured:
        """Apply the configuration, run the load and judge it. A trial that a guard stops is rolled back at once."""
        started_s = time.monotonic()
        subject = self._checked()
        kills = count_oom_kills()
        say("applying the configuration")
        try:
            applied = subject.apply(task.config, limit_s=task.limit_s - _SPARE_S)
            done = f"{applied.done} in {time.monotonic() - started_s:.1f} s" if applied.done else "nothing to change"
            drifted = self._drifted(task, say)
        except (RefusedStart, NotReady, NoAnswer) as error:
            kind, note = FailureKind.TIME_OUT, "never ready"
            if isinstance(error, RefusedStart):
                kind = refused_start(str(error), oom_kills=count_oom_kills() - kills)
            elif isinstance(error, NoAnswer):
                kind, note = FailureKind.CRASH, "no answer to a probe"
            subject.after_failure()
            outcome = TrialOutcome.failed(kind, str(error))
            return Measured(outcome=outcome, duration_s=time.monotonic() - started_s, note=note)
        left_s = task.limit_s - _SPARE_S - (time.monotonic() - started_s)
        shown = run_loads(subject, task, limit_s=left_s, say=say, known=drifted)
        if shown.outcome.failure is not None and not shown.outcome.invalid:  # also if a guard broke in
            subject.after_failure()
        seen = {name: value for name, value in shown.outcome.metrics.items() if name not in subject.unseen}
        return replace(
            shown,
            outcome=replace(shown.outcome, metrics=seen),
            duration_s=time.monotonic() - started_s,
            restarted=applied.restarted,
            note="; ".join(filter(None, (done, *applied.notes, shown.note))),
        )

    def apply(self, config: Config) -> None:
        """Leave the live service with this configuration permanently."""
        self._checked().keep(config)

    def restore(self) -> None:
        """Give back a running service as it was."""
        if self._subject is not None:
            self._subject.restore()

    def close(self) -> None:
        """Remove what was started, or disconnect from the live service."""
        subject, self._subject = self._subject, None
        if subject is not None:
            subject.close()

    def _drifted(self, task: MeasurementTask, say: Say) -> dict[str, float]:
        """Return the metric of `quality`, if the job asks for it."""
        subject = self._checked()
        if QUALITY_DRIFT not in subject.spec.goal.metrics:
            return {}
        say("asking the probes")
        running = subject.running
        scenarios = [with_address(scenario, running.url, running.prefix) for scenario in subject.scenarios]
        return {QUALITY_DRIFT: quality_drift(scenarios, self._folder, is_default=task.config == subject.spec.default)}

    def _checked(self) -> Subject:
        if self._subject is None:
            raise PlaitError("check comes first")
        return self._subject


def refused_start(reason: str, *, oom_kills: int) -> FailureKind:
    """Return what kept a configuration from being brought up, by what Serve says and how many processes the kernel
    killed for memory meanwhile."""
    return FailureKind.OUT_OF_MEMORY if oom_kills or mentions_out_of_memory(reason) else FailureKind.REFUSED_START


def _described(subject: Subject) -> TuningSubject:
    """Return what the library remembers of the service, its load and this machine."""
    rates = [getattr(each.arrivals, "rate_per_s", 0.0) for each in subject.scenarios]
    slos = [slo.latency_ms for each in subject.scenarios for slo in (each.slo, *each.slos.values()) if slo is not None]
    workload = {"offered_per_s": max(rates), "slo_ms": min(slos, default=0.0), "scenarios": float(len(rates))}
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores, machine = usable_cores(), platform.machine()
    price = subject.spec.prices.core * cores
    versions = {name: version(name) for name in ("plait", "ray", "torch")}
    return TuningSubject(
        service=subject.name,
        workload={**workload, **subject.features},
        hardware=Hardware(name=machine, cpus=cores, memory_bytes=memory_bytes, price_per_hour=price),
        versions=versions | {"python": platform.python_version()},
        costs=subject.costs,
    )
