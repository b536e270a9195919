"""An application of plait as what is tuned: its clone, or the live service."""

from __future__ import annotations

import logging
from pathlib import Path

from plait.config import PlaitConfig
from plait.deployments import Effect, logical_cpus
from plait.errors import StateError, told
from plait.tuning.measure.application import HAND_OVER_S, Applied, Compose, LiveBusy
from plait.tuning.measure.checks import max_replicas_config, prepare, target_config
from plait.tuning.measure.clone import Clone
from plait.tuning.measure.cost import host_cores_of, known_costs, reserved
from plait.tuning.measure.knobs import apply_knobs
from plait.tuning.measure.live import LiveServer
from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.spec import JobSpec, TuningTarget
from plait_autoconfig.values import Config
from plait_kernels.cores import usable_cores
from plait_serving.diffusion.request_terms import RequestTerms

_log = logging.getLogger(__name__)

_RESTARTS = frozenset({Effect.RESTARTED, Effect.ADDED, Effect.SCALED})


class PlaitSubject:
    """An application of plait to be measured; made when the job is sound and its Ray runs. `running`: the application;
    `name`, `features`: as the library remembers it. `log_path`: where its processes write. `unseen`: metrics that
    cannot be seen of it."""

    unseen: frozenset[str] = frozenset()

    def __init__(self, spec: JobSpec, target: TuningTarget, *, compose: Compose, root: Path, folder: Path) -> None:
        """Raises `JobRefused` before anything is started, also if another process tunes the live service."""
        config = target_config(target, live=bool(target.live))
        self.scenarios, self.guard = prepare(spec, config)
        self.running: Clone | LiveServer
        self.log_path = folder / "clone.log"
        if target.live:
            with told(LiveBusy, to=JobRefused), told(StateError, about="target.live", to=JobRefused):
                self.running = LiveServer(compose, root=root, port=config.server.port, wait_s=HAND_OVER_S)
            config = self.running.original
            self.scenarios, self.guard = prepare(spec, config)
        else:
            self.running = Clone(compose, root=root, log_path=self.log_path, say=_log.info)
            try:
                self.running.start(config, num_cpus=logical_cpus(max_replicas_config(spec, config)) + 1)
            except BaseException:
                self.running.close()
                raise
        self.spec, self._base = spec, config
        self.name, self.features = _named(config, target.app)
        self.costs = known_costs(spec, lambda cell: reserved(self._with(cell)))

    def apply(self, config: Config, *, limit_s: float) -> Applied:
        """Bring a configuration into force and wait until it takes requests. Raises `RefusedStart` or `NotReady`."""
        wanted = self._with(config)
        effects = self.running.apply(wanted, limit_s=limit_s)
        return Applied(
            restarted=tuple(name for name, effect in effects.items() if effect in _RESTARTS),
            done=", ".join(f"{name} {effect.value}" for name, effect in sorted(effects.items())),
            notes=_shared_note(wanted),
        )

    def after_failure(self) -> None:
        """Restore a live service, which never keeps a harmful configuration; a clone is recreated by the next trial."""
        self.running.restore()

    def keep(self, config: Config) -> None:
        """Leave the live service with these knobs permanently."""
        self.running.keep(self._with(config))

    def restore(self) -> None:
        """Restore the original configuration of the live service."""
        self.running.restore()

    def close(self) -> None:
        """Remove the clone, or disconnect from the live service."""
        self.running.close()

    def _with(self, config: Config) -> PlaitConfig:
        return apply_knobs(self._base, self.spec.settings(config))


def _named(config: PlaitConfig, app: str) -> tuple[str, dict[str, float]]:
    """Return how the library calls the service, and what it knows of it."""
    if config.images is None or app != "images":
        return "recommend:" + ",".join(sorted(config.ranking_models)), {}
    steps = config.images.defaults.steps or RequestTerms().steps
    return f"images:{config.images.public_name}", {"default_steps": float(steps)}


def _shared_note(config: PlaitConfig) -> tuple[str, ...]:
    """Return the label of a machine whose replicas cannot all use their threads at once; else nothing."""
    host = host_cores_of(config, machine_cores=usable_cores())
    return (f"shared: {host.planned_threads} threads on {host.cores} cores",) if host.is_shared else ()
