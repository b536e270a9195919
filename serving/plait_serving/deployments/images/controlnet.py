"""The deployment of one ControlNet, and how a base replica connects to its replicas.

In the application, one deployment per ControlNet::

    serve.deployment(ControlNetDeployment).options(
        name="controlnet-edges", num_replicas=2, user_config=ControlNetKnobs(threads=1).model_dump()
    ).bind(name="edges", folder="/models/edges", dtype="float32", device="cpu")

In a base replica, with the handle that Serve made of it::

    replicas = ServeReplicas("ControlNet edges", handle)
    client = RemoteControlNetClient("edges", replicas.connect, worth_moving=replicas.worth_moving)

Serve places and supervises the replicas and hands out their addresses and secrets (`ControlNetDeployment.describe`,
called on every replica at once with `handle.broadcast`); everything that moves on each step goes over the fabric.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from plait_disagg.queue.scale import Gauge
from plait_fabric import new_secret
from plait_fabric.rpc.replicas import Replica
from plait_kernels.threads import run_on_own_thread
from plait_serving.cores import cpu_threads, declare_thread_cap
from plait_serving.deployments.fabric_endpoints import open_listeners, this_replica
from plait_serving.deployments.images.counted import audit_families, gpu_families
from plait_serving.deployments.process import configure_logging, seconds_to_start
from plait_serving.deployments.ray_internals import given_knobs
from plait_serving.deployments.scaling import PRESSURE, busy_share
from plait_serving.diffusion.controlnet.service import ControlNetService, ServiceLimits
from plait_serving.diffusion.families import load_controlnet
from plait_serving.diffusion.families.preparation import auditor_for, preparer_for, uses_graphs
from plait_serving.diffusion.knobs import ExecutorName
from plait_serving.diffusion.memory import resolve_device, resolve_dtype
from plait_serving.diffusion.settings import default_prepared_folder
from plait_serving.replica_metrics import ReplicaMetrics, this_process
from plait_serving.sections import Section

_log = logging.getLogger(__name__)

_DRAIN_S = 5.0


class ControlNetKnobs(Section):
    """The settings of a running ControlNet deployment that can change; carried in Serve's `user_config`."""

    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads of a forward pass; 0: all cores")
    largest_batch_rows: int = Field(default=64, ge=1, le=4096, description="rows of one forward pass")


class ControlNetDeployment:
    """One replica: a `ControlNetService` on a shared-memory and a TCP address, with every hook that Serve calls."""

    def __init__(
        self,
        *,
        name: str,
        folder: str | Path,
        dtype: str = "auto",
        device: str = "auto",
        executor: str = "auto",
        audit_every: int = 0,
    ) -> None:
        """Load the weights and listen. "auto" means CUDA in float16 if available, otherwise the CPU in float32.

        `executor` is an `ExecutorName`; `audit_every` as in `EngineSettings`. Raises `ModelError`.
        """
        configure_logging(f"controlnet-{name}", os.environ)
        chosen = ControlNetKnobs.model_validate(given_knobs())
        self._controlnet, self._threads = name, chosen.threads
        self._secret = new_secret()
        place = resolve_device(device)
        precision = resolve_dtype(dtype, place)
        self._auditor = auditor_for(
            audit_every,
            cache=default_prepared_folder(),
            idle=lambda: hasattr(self, "_service") and self._service.is_idle,
        )
        preparer = preparer_for(
            ExecutorName(executor),
            device=place,
            dtype=precision,
            threads=lambda: self._threads,
            cache=default_prepared_folder(),
            auditor=self._auditor,
        )
        runner = run_on_own_thread(
            lambda: load_controlnet(
                Path(folder),
                dtype=precision,
                device=place,
                preparer=preparer,
                graphs=uses_graphs(ExecutorName(executor), torch.device(place)),
            )
        )
        self._service = ControlNetService(
            name,
            runner,
            open_listeners(self._secret, kind="controlnet"),
            limits=ServiceLimits(largest_batch_rows=chosen.largest_batch_rows),
            threads=cpu_threads(chosen.threads),
        )
        self._gauge = Gauge(lambda: {"busy_s": self._service.statistics().busy_s}, busy_share)
        self._start_s = seconds_to_start()
        _log.info(
            "ControlNet %s (%s on %s) listens at %s", name, runner.dtype, place, ", ".join(self._service.addresses)
        )

    async def describe(self) -> Replica:
        """Return this replica's addresses and secret. For base replicas only; Serve carries the answer."""
        service = self._service
        channels = service.statistics().channels
        return this_replica(service.addresses, self._secret, channels=channels, start_s=self._start_s)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this replica's pressure; Serve collects it where the number of replicas follows the load."""
        return {PRESSURE: self._gauge.read()}

    async def metric_families(self) -> ReplicaMetrics:
        """Return what this replica's audits found, and what it has of a GPU, for `/metrics`."""
        found = [*audit_families({self._controlnet: self._auditor.statistics()}), *gpu_families()]
        return ReplicaMetrics(replica=this_process(), families=found)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply `user_config`; Serve calls this after the constructor and on every change. Raises on a bad knob."""
        knobs = ControlNetKnobs.model_validate(dict(user_config))
        self._threads = knobs.threads
        declare_thread_cap(knobs.threads)
        self._service.reconfigure(threads=cpu_threads(knobs.threads), largest_batch_rows=knobs.largest_batch_rows)

    def check_health(self) -> None:
        """Raise if the replica is unhealthy. Serve calls this every few seconds and replaces a replica that keeps
        raising."""
        if not self._service.alive:
            raise RuntimeError("the ControlNet's compute thread has died")
        self._service.check_progress()

    def __del__(self) -> None:
        """Shut down when Serve removes the replica: requests that have arrived are answered, then clients move
        elsewhere."""
        if hasattr(self, "_service"):
            self._service.stop(drain_s=_DRAIN_S)
