"""Deployment classes whose modules are imported where they run, not where the application is built.

Whoever builds the application (the command, Serve's builder task) needs no torch; importing it there would cost some
seconds and half a gigabyte. So each deployment that holds a model is a `LazyReplica`: it names the class that it stands
for, and the methods that Serve and other replicas call, as a protocol. Serve looks methods up on the class, so each of
them becomes a real one that passes the call on.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any, ClassVar, Protocol

from plait_serving.deployments.threads import choose_omp_wait, unset_ray_threads
from plait_serving.ranking.config import OmpWait

__all__ = ["LazyControlNet", "LazyEngine", "LazyRankWorker", "LazyReplica"]


class LazyReplica:
    """Stands for another class: imports it in the replica, makes one, and passes every method of the protocol on.

    A subclass says ``target="module:Class"``, ``methods=`` the protocol, and which of them are ``streams``.
    """

    _target: ClassVar[str]

    def __init_subclass__(cls, *, target: str, methods: type, streams: tuple[str, ...] = ()) -> None:
        cls._target = target
        for name, method in inspect.getmembers(methods, inspect.isfunction):
            if not name.startswith("_"):
                setattr(cls, name, _passed_on(name, method, is_stream=name in streams))

    def __init__(self, *args: Any, omp_wait: OmpWait = "default", **kwargs: Any) -> None:
        """Raises what the target's constructor raises. ``omp_wait`` and Ray's threads must be settled before torch is
        imported, which the import does."""
        choose_omp_wait(os.environ, omp_wait)
        unset_ray_threads(os.environ)
        module, _, name = self._target.partition(":")
        self._inner = getattr(import_module(module), name)(*args, **kwargs)

    def __del__(self) -> None:
        """Serve calls it when it takes the replica away."""
        if hasattr(self, "_inner"):
            self._inner.__del__()


def _passed_on(name: str, method: Callable[..., Any], *, is_stream: bool) -> Callable[..., Any]:
    """A method of the same kind, since Serve treats plain, async and generator methods differently."""
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
    """What Serve asks of every replica that holds a model."""

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Applies new knobs."""

    def check_health(self) -> None:
        """Raises if the replica should be replaced."""


class EngineMethods(ReplicaMethods, Protocol):
    """What the ingress asks of a base model's replica."""

    def generate(self, request: Any) -> AsyncGenerator[Any, None]:
        """Streams the request's events."""

    async def catalog(self) -> Any:
        """Tells what can be asked for now."""

    async def health(self) -> Any:
        """Tells whether it would answer now."""

    async def metrics_text(self) -> str:
        """Tells its metrics in Prometheus' text format."""

    async def drain(self, drain_s: float) -> None:
        """Finishes what runs."""


class ControlNetMethods(ReplicaMethods, Protocol):
    """What base replicas ask of a ControlNet's replica; tensors go over the fabric."""

    async def describe(self) -> Any:
        """Tells where this replica can be reached."""

    async def statistics(self) -> dict[str, float]:
        """Tells its numbers."""


class RankWorkerMethods(ReplicaMethods, Protocol):
    """What the ingress and other workers ask of a ranking worker; requests go over the fabric."""

    async def describe(self) -> Any:
        """Tells where this replica can be reached."""

    async def metrics(self) -> Mapping[str, float]:
        """Tells its numbers."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tells what scaling goes by."""

    async def stage_update(self, folder: str) -> Exception | None:
        """Makes an update ready; returns what went wrong."""

    async def switch_version(self, version: str) -> Exception | None:
        """Serves the version; returns what went wrong."""

    async def drain(self, drain_s: float) -> None:
        """Finishes what runs."""


class LazyEngine(
    LazyReplica,
    target="plait_serving.deployments.images.engine:EngineReplica",
    methods=EngineMethods,
    streams=("generate",),
):
    """A base model."""


class LazyControlNet(
    LazyReplica,
    target="plait_serving.deployments.images.controlnet:ControlNetDeployment",
    methods=ControlNetMethods,
):
    """A ControlNet."""


class LazyRankWorker(
    LazyReplica,
    target="plait_serving.deployments.ranking.worker:RankWorker",
    methods=RankWorkerMethods,
):
    """A CN, HN or whole worker of a ranking model."""
