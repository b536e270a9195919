"""Deployment classes whose modules are imported where they run, not where the application is built.

The process that builds the application (the command, Serve's builder task) needs no torch; importing it there would
cost some seconds and half a gigabyte. So each deployment that holds a model is a `LazyReplica`: it names the class
that it stands for and, as a protocol, the methods that Serve and other replicas call. Serve looks methods up on the
class, so each of them becomes a real method that forwards the call.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from plait_deploy.on_ray.replica_location import whereabouts
from plait_serving.deployments.process import choose_omp_wait, unset_ray_threads
from plait_serving.imports import importing

if TYPE_CHECKING:
    from plait_serving.ranking.config import OmpWait


class LazyReplica:
    """Stands for another class: imports it in the replica, makes one, and forwards every method of the protocol.

    A subclass sets `target="module:Class"`, `methods=` to the protocol, and `streams` to the methods that stream.
    """

    target: ClassVar[str]
    """The class that it stands for, as `module:Class`."""

    def __init_subclass__(cls, *, target: str, methods: type, streams: tuple[str, ...] = ()) -> None:
        cls.target = target
        for name, method in inspect.getmembers(methods, inspect.isfunction):
            if not name.startswith("_"):
                setattr(cls, name, _passed_on(name, method, is_stream=name in streams))

    def __init__(self, *args: Any, omp_wait: OmpWait = "default", **kwargs: Any) -> None:
        """Import and construct the target; raises whatever its constructor raises. `omp_wait` and Ray's threads must be
        settled before the import, because it imports torch."""
        choose_omp_wait(os.environ, omp_wait)
        unset_ray_threads(os.environ)
        module, _, name = self.target.partition(":")
        with importing():
            target = getattr(import_module(module), name)
        self._inner = target(*args, **kwargs)

    async def whereabouts(self) -> dict[str, float]:
        """Return the node of this replica, and its devices there."""
        return whereabouts()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the target reports to Serve's controller, if it does, and where this replica is."""
        report = getattr(self._inner, "record_autoscaling_stats", None)
        return {**(await report() if report is not None else {}), **whereabouts()}

    def __del__(self) -> None:
        """Shut down; Serve calls this when it removes the replica."""
        if hasattr(self, "_inner"):
            self._inner.__del__()


def _passed_on(name: str, method: Callable[..., Any], *, is_stream: bool) -> Callable[..., Any]:
    """Return a method of the same kind, since Serve treats plain, async and generator methods differently."""
    if is_stream:

        @wraps(method)
        async def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            items = getattr(self._inner, name)(*args, **kwargs)
            try:
                async for item in items:
                    yield item
            finally:
                await items.aclose()

        return stream
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self._inner, name)(*args, **kwargs)

        return call

    @wraps(method)
    def call_at_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    return call_at_once


class ReplicaMethods(Protocol):
    """What Serve calls on every replica that holds a model."""

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply new knobs."""

    def check_health(self) -> None:
        """Raise if the replica should be replaced."""


class EngineMethods(ReplicaMethods, Protocol):
    """What the ingress calls on a base model's replica."""

    def generate(self, request: Any) -> AsyncGenerator[Any, None]:
        """Yield the request's events."""

    def catalog(self, known: str) -> AsyncGenerator[Any, None]:
        """Yield what can be requested now, in pieces."""

    async def refused(self) -> Mapping[str, str]:
        """Return why models are not served, by name."""

    async def rest(self, model: str, asleep: bool) -> None:  # Serve passes arguments by place
        """Let a model's weights leave memory, or bring them back."""

    async def health(self) -> Any:
        """Return whether the replica would answer now."""

    async def metric_families(self) -> Any:
        """Return the metrics and the replica's name."""

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return by what requests are sent here."""

    async def drain(self, drain_s: float) -> None:
        """Refuse new requests and finish those that run."""


class ControlNetMethods(ReplicaMethods, Protocol):
    """What base replicas call on a ControlNet's replica; tensors go over the fabric."""

    async def describe(self) -> Any:
        """Return this replica's addresses and secret."""

    async def metric_families(self) -> Any:
        """Return the metrics and the replica's name."""


class RankWorkerMethods(ReplicaMethods, Protocol):
    """What the ingress and other workers call on a ranking worker; requests go over the fabric."""

    async def describe(self) -> Any:
        """Return this replica's addresses and secret."""

    async def why_not_ready(self) -> str | None:
        """Return what is missing to answer a request now, if anything."""

    async def metric_families(self) -> Any:
        """Return the metrics and the replica's name."""

    async def stage_update(self, folder: str) -> Exception | None:
        """Stage an update; return the error, if any."""

    async def switch_version(self, version: str) -> Exception | None:
        """Switch to the version; return the error, if any."""

    async def drain(self, drain_s: float) -> None:
        """Refuse new requests and finish those that run."""


class LazyEngine(
    LazyReplica,
    target="plait_serving.deployments.images.engine:EngineReplica",
    methods=EngineMethods,
    streams=("generate", "catalog"),
):
    """A lazily built replica of a base model."""


class LazyControlNet(
    LazyReplica,
    target="plait_serving.deployments.images.controlnet:ControlNetDeployment",
    methods=ControlNetMethods,
):
    """A lazily built replica of a ControlNet."""


class LazyRankWorker(
    LazyReplica,
    target="plait_serving.deployments.ranking.worker:RankWorker",
    methods=RankWorkerMethods,
):
    """A lazily built CN, HN or whole worker of a ranking model."""


LAZY = {of.target: of for of in (LazyEngine, LazyControlNet, LazyRankWorker)}
"""The classes here by those that they stand for."""
