"""The measurer of `plait_autoconfig.jobs` for plait's own applications: a clone, or the live service.

Metrics of a trial: those of `load`, and `cpu_cores` (busy, mean), `memory_gib` (maximum), `cost_per_hour` (`cost`),
`goodput_per_cost` (responses in time per unit of money); if the job asks for it, `quality_drift` (`quality`).
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

from plait.config import PlaitConfig
from plait.deployments import Effect, logical_cpus
from plait.errors import PlaitError, StateError
from plait.server.state import state_root
from plait.tuning.measure.application import Compose, NotReady, RefusedStart, compose_of
from plait.tuning.measure.checks import PreparedJob, max_replicas_config, prepare, target_config
from plait.tuning.measure.clone import Clone
from plait.tuning.measure.cost import host_cores_of, known_costs
from plait.tuning.measure.early_stop import Guard
from plait.tuning.measure.failures import of_start
from plait.tuning.measure.knobs import apply_knobs
from plait.tuning.measure.live import LiveBusy, LiveServer
from plait.tuning.measure.quality import QUALITY_DRIFT, NoAnswer, quality_drift
from plait.tuning.measure.trial import LoadPlan, run_loads, with_address
from plait_autoconfig.errors import JobBusy, JobRefused
from plait_autoconfig.jobs.exit_status import count_oom_kills
from plait_autoconfig.jobs.measurer import Measured, MeasurementTask, Say, TuningSubject
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.values import Config, FailureKind, Hardware, TrialOutcome
from plait_kernels.cores import usable_cores
from plait_serving.diffusion.request_terms import RequestTerms

_log = logging.getLogger(__name__)

_SPARE_S = 5.0
"""The part of a trial's time reserved for what follows the load, so that we end the trial before our parent does."""

_RESTARTS = frozenset({Effect.RESTARTED, Effect.ADDED, Effect.SCALED})


def open_measurer(*, folder: Path, live: bool = False, compose: str = "") -> PlaitMeasurer:
    """Create the measurer. `live`: the command allowed it. `compose`: `module:function` that makes the Serve
    application of a configuration, in place of plait's own."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return PlaitMeasurer(folder=folder, root=state_root(os.environ), compose=compose_of(compose), may_be_live=live)


class PlaitMeasurer:
    """The `plait_autoconfig.jobs.measurer.Measurer` for plait's own applications."""

    def __init__(self, *, folder: Path, root: Path, compose: Compose, may_be_live: bool) -> None:
        self._folder = folder
        self._root = root
        self._compose = compose
        self._may_be_live = may_be_live
        self._spec: JobSpec | None = None
        self._prepared: PreparedJob | None = None
        self._application: Clone | LiveServer | None = None

    def check(self, spec: JobSpec) -> TuningSubject:
        """Refuse what cannot be measured; then start the clone's Ray, or attach to the live service."""
        live = bool(spec.target.live)
        if live and not self._may_be_live:
            raise JobRefused("target.live: the service that users are on is only tuned with the flag --live")
        config = target_config(spec.target, live=live)
        self._prepared = prepare(spec, config)
        self._spec = spec
        if live:
            self._application = self._attach(config)
            self._prepared = prepare(spec, self._application.original)
        else:
            clone = Clone(self._compose, root=self._root, log_path=self._folder / "clone.log", say=_log.info)
            self._application = clone
            clone.start(config, num_cpus=logical_cpus(max_replicas_config(spec, config)) + 1)
        return _subject(spec, self._prepared)

    def measure(self, task: MeasurementTask, say: Say) -> Measured:
        """Apply the configuration, run the load and judge it. A trial that a guard stops is rolled back at once."""
        started_s = time.monotonic()
        spec, prepared, application = self._checked()
        kills = count_oom_kills()
        config = apply_knobs(prepared.config, spec.settings(task.config))
        say("applying the configuration")
        try:
            effects = application.apply(config, limit_s=task.limit_s - _SPARE_S)
        except (RefusedStart, NotReady) as error:
            outcome = (
                of_start(str(error), oom_kills=count_oom_kills() - kills)
                if isinstance(error, RefusedStart)
                else TrialOutcome.failed(FailureKind.TIME_OUT, str(error))
            )
            self._after_failure()
            return Measured(outcome=outcome, duration_s=time.monotonic() - started_s, note="never ready")
        applied_s = time.monotonic() - started_s
        try:
            drifted = self._drifted(task, say)
        except NoAnswer as error:
            self._after_failure()
            outcome = TrialOutcome.failed(FailureKind.CRASH, str(error))
            return Measured(outcome=outcome, duration_s=time.monotonic() - started_s, note="no answer to a probe")
        plan = LoadPlan(
            scenarios=prepared.scenarios,
            search=spec.is_capacity_search and not task.rate_per_s,
            seed=task.seed,
            limit_s=task.limit_s - _SPARE_S - (time.monotonic() - started_s),
            prices=spec.prices,
            goal=spec.goal.goals[0] if len(spec.goal.goals) == 1 else None,
            to_beat=task.to_beat,
            expected_per_s=task.expected_per_s,
            rate_per_s=task.rate_per_s,
            guard=None if prepared.guard is None else partial(Guard, prepared.guard),
        )
        shown = run_loads(
            application.running,
            plan,
            folder=task.folder,
            log_path=self._folder / "clone.log",
            say=say,
            known=drifted,
        )
        if shown.guard_breached or (shown.outcome.failure is not None and not shown.outcome.invalid):
            self._after_failure()
        return Measured(
            outcome=shown.outcome,
            duration_s=time.monotonic() - started_s,
            load_s=shown.load_s,
            samples=shown.samples,
            restarted=tuple(name for name, effect in effects.items() if effect in _RESTARTS),
            artefacts=shown.artefacts,
            note="; ".join((_effects_note(effects, applied_s), *_shared_note(config), *shown.notes)),
        )

    def apply(self, config: Config) -> None:
        """Leave the live service with this configuration permanently."""
        spec, prepared, application = self._checked()
        if isinstance(application, LiveServer):
            application.keep(apply_knobs(prepared.config, spec.settings(config)))

    def restore(self) -> None:
        """Restore the original configuration of the live service."""
        if isinstance(self._application, LiveServer):
            self._application.restore()

    def close(self) -> None:
        """Remove the clone, or disconnect from the live service."""
        application, self._application = self._application, None
        if application is not None:
            application.close()

    def _drifted(self, task: MeasurementTask, say: Say) -> dict[str, float]:
        """Return the metric of `quality`, if the job asks for it."""
        spec, prepared, application = self._checked()
        if QUALITY_DRIFT not in spec.goal.metrics:
            return {}
        say("asking the probes")
        running = application.running
        scenarios = [with_address(scenario, running.url, running.prefix) for scenario in prepared.scenarios]
        return {QUALITY_DRIFT: quality_drift(scenarios, self._folder, is_default=task.config == spec.default)}

    def _attach(self, config: PlaitConfig) -> LiveServer:
        try:
            return LiveServer(self._compose, root=self._root, port=config.server.port)
        except LiveBusy as error:
            raise JobBusy(str(error)) from error
        except StateError as error:
            raise JobRefused(f"target.live: {error}") from error

    def _after_failure(self) -> None:
        """Restore a live service, which never keeps a harmful configuration; a clone is recreated by the next trial."""
        if isinstance(self._application, LiveServer):
            self._application.restore()
        elif self._application is not None:
            self._application.running.config = None

    def _checked(self) -> tuple[JobSpec, PreparedJob, Clone | LiveServer]:
        if self._spec is None or self._prepared is None or self._application is None:
            raise PlaitError("check comes first")
        return self._spec, self._prepared, self._application


def _subject(spec: JobSpec, prepared: PreparedJob) -> TuningSubject:
    """Return what the library remembers of the service, its load and this machine."""
    config = prepared.config
    rates = [getattr(each.arrivals, "rate_per_s", 0.0) for each in prepared.scenarios]
    slos = [slo.latency_ms for each in prepared.scenarios for slo in (each.slo, *each.slos.values()) if slo is not None]
    workload = {"offered_per_s": max(rates), "slo_ms": min(slos, default=0.0), "scenarios": float(len(rates))}
    if config.images is not None and spec.target.app == "images":
        service = f"images:{config.images.public_name}"
        workload["default_steps"] = float(config.images.defaults.steps or RequestTerms().steps)
    else:
        service = "recommend:" + ",".join(sorted(config.ranking_models))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    hardware = Hardware(
        name=platform.machine(),
        cpus=usable_cores(),
        memory_bytes=memory_bytes,
        price_per_hour=spec.prices.core * usable_cores(),
    )
    versions = {name: version(name) for name in ("plait", "ray", "torch")}
    return TuningSubject(
        service=service,
        workload=workload,
        hardware=hardware,
        versions=versions | {"python": platform.python_version()},
        costs=known_costs(spec, config),
    )


def _effects_note(effects: Mapping[str, Effect], seconds: float) -> str:
    if not effects:
        return "nothing to change"
    return ", ".join(f"{name} {effect.value}" for name, effect in sorted(effects.items())) + f" in {seconds:.1f} s"


def _shared_note(config: PlaitConfig) -> tuple[str, ...]:
    """Return the label of a machine whose replicas cannot all use their threads at once; else nothing."""
    host = host_cores_of(config, machine_cores=usable_cores())
    return (f"shared: {host.planned_threads} threads on {host.cores} cores",) if host.is_shared else ()
