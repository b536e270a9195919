"""The deployment of one ControlNet, and how a base replica reaches its replicas.

In the application, one deployment per ControlNet::

    serve.deployment(ControlNetDeployment).options(
        name="controlnet-edges", num_replicas=2, user_config=ControlNetKnobs(threads=1).model_dump()
    ).bind(name="edges", folder="/models/edges", dtype="float32", device="cpu")

In a base replica, with the handle that Serve made of it::

    connect = ServeConnect("edges", handle)
    client = RemoteControlNetClient("edges", connect, worth_moving=connect.worth_moving)

Serve places and supervises the replicas and hands out their addresses and secrets (`ControlNetDeployment.describe`,
asked of every replica at once with ``handle.broadcast``); what moves every step goes over the fabric.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from plait_fabric import new_secret
from plait_fabric.rpc.replicas import Link, NoReplica, Replica, worth_moving
from plait_fabric.threads import run_on_own_thread
from plait_serving.deployments.fabric_endpoints import (
    ServeReplicas,
    cpu_threads,
    host_id,
    open_listeners,
    socket_folder,
)
from plait_serving.deployments.logs import configure_logging
from plait_serving.diffusion.controlnet.model import load_controlnet
from plait_serving.diffusion.controlnet.service import ControlNetService, ServiceLimits
from plait_serving.diffusion.errors import ControlNetUnavailable

__all__ = ["ControlNetDeployment", "ControlNetKnobs", "ServeConnect"]

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DRAIN_S = 5.0


class ControlNetKnobs(BaseModel):
    """What can change on a running ControlNet deployment; carried in Serve's ``user_config``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads of a forward pass; 0: all cores")
    largest_batch_rows: int = Field(default=64, ge=1, le=4096, description="rows of one forward pass")


class ControlNetDeployment:
    """One replica: a `ControlNetService` on a shared-memory and a TCP address. All that Serve does with it is here."""

    def __init__(
        self,
        *,
        name: str,
        folder: str | Path,
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 0,
        knobs: Mapping[str, Any] | None = None,
    ) -> None:
        """Loads the weights and listens. "auto": CUDA in float16 if there is one, else the CPU in float32.

        ``threads`` and ``knobs`` hold until Serve's ``user_config`` says otherwise. Raises `ModelError`.
        """
        import ray
        from ray import serve

        configure_logging(f"controlnet-{name}", os.environ)
        chosen = ControlNetKnobs.model_validate({"threads": threads, **(knobs or {})})
        self._name = str(serve.get_replica_context().replica_id.to_full_id_str())
        self._secret = new_secret()
        place = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        auto = torch.float16 if place.startswith("cuda") else torch.float32
        runner = run_on_own_thread(lambda: load_controlnet(Path(folder), dtype=_DTYPES.get(dtype, auto), device=place))
        self._service = ControlNetService(
            name,
            runner,
            open_listeners(
                self._secret, kind="controlnet", ip_address=ray.util.get_node_ip_address(), folder=socket_folder()
            ),
            limits=ServiceLimits(largest_batch_rows=chosen.largest_batch_rows),
            threads=cpu_threads(chosen.threads),
        )
        _log.info(
            "ControlNet %s (%s on %s) listens at %s", name, runner.dtype, place, ", ".join(self._service.addresses)
        )

    async def describe(self) -> Replica:
        """Where and with which secret this replica can be reached. For base replicas only: Serve carries it."""
        return Replica(
            name=self._name,
            host=host_id(),
            addresses=self._service.addresses,
            secret=self._secret,
            channels=self._service.statistics().channels,
            pid=os.getpid(),
        )

    async def statistics(self) -> dict[str, float]:
        """`ServiceStatistics` as plain numbers."""
        return asdict(self._service.statistics())

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve calls it after the constructor and whenever ``user_config`` changes. Raises on a bad knob."""
        knobs = ControlNetKnobs.model_validate(dict(user_config))
        self._service.reconfigure(threads=cpu_threads(knobs.threads), largest_batch_rows=knobs.largest_batch_rows)

    def check_health(self) -> None:
        """Serve calls it every few seconds and replaces the replica when it keeps raising."""
        if not self._service.alive:
            raise RuntimeError("the ControlNet's compute thread has died")

    def __del__(self) -> None:
        """Serve calls it when it takes the replica away: what has arrived is answered, then clients go elsewhere."""
        if hasattr(self, "_service"):
            self._service.stop(drain_s=_DRAIN_S)


class ServeConnect:
    """A `Connect`: asks Serve which replicas a ControlNet has and dials one. Blocks its thread, milliseconds mostly."""

    def __init__(
        self,
        name: str,
        handle: Any,
        *,
        describe_timeout_s: float = 5.0,
        dial_timeout_s: float = 5.0,
        chance: random.Random | None = None,
    ) -> None:
        """``handle``: Serve's `DeploymentHandle` of the ControlNet's deployment. Nothing is asked of it yet."""
        self._chance = chance or random.Random()
        self._replicas = ServeReplicas(
            f"ControlNet {name}",
            handle,
            describe_timeout_s=describe_timeout_s,
            dial_timeout_s=dial_timeout_s,
            chance=self._chance,
        )

    def __call__(self, left_out: frozenset[str]) -> Link:
        """A channel to a replica that is not left out. Raises `ControlNetUnavailable`."""
        try:
            return self._replicas.connect(left_out)
        except NoReplica as error:
            raise ControlNetUnavailable(str(error)) from error

    def worth_moving(self, current: str) -> bool:
        """Whether a client of that replica should go to another. Raises `ControlNetUnavailable`."""
        return worth_moving(self.replicas(), current, chance=self._chance)

    def replicas(self) -> list[Replica]:
        """The replicas that answer now. Raises `ControlNetUnavailable` if Serve has none."""
        try:
            return self._replicas.replicas()
        except NoReplica as error:
            raise ControlNetUnavailable(str(error)) from error
