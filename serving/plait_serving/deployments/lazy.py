"""Deployment classes whose modules are imported where they run, not where the application is built.

The process that builds the application (the command, Serve's builder task) needs no torch; importing it there would
cost some seconds and half a gigabyte. So each deployment that holds a model is a `LazyReplica`: it names the class
that it stands for and the methods that other replicas call. Serve looks methods up on the class, so each of them
becomes a real method that forwards the call.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from plait_deploy.on_ray.nodes import whereabouts
from plait_serving.deployments.process import choose_omp_wait, unset_ray_threads
from plait_serving.imports import importing

if TYPE_CHECKING:
    from plait_serving.ranking.config import OmpWait


class LazyReplica:
    """Stands for another class: imports it in the replica, makes one, and forwards what is called on it.

    A subclass sets `target="module:Class"`, `calls` to its coroutines, and `streams` to its methods that stream.
    """

    target: ClassVar[str]
    """The class that it stands for, as `module:Class`."""

    def __init_subclass__(cls, *, target: str, calls: tuple[str, ...], streams: tuple[str, ...] = ()) -> None:
        cls.target = target
        for names, forward in ((calls, _call), (streams, _stream)):
            for name in names:
                setattr(cls, name, forward(name))

    def __init__(self, *args: Any, omp_wait: OmpWait = "default", **kwargs: Any) -> None:
        """Import and construct the target; raises whatever its constructor raises. `omp_wait` and Ray's threads must be
        settled before the import, because it imports torch."""
        choose_omp_wait(os.environ, omp_wait)
        unset_ray_threads(os.environ)
        module, _, name = self.target.partition(":")
        with importing():
            target = getattr(import_module(module), name)
        self._inner = target(*args, **kwargs)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply new knobs."""
        self._inner.reconfigure(user_config)

    def check_health(self) -> None:
        """Raise if the replica should be replaced."""
        self._inner.check_health()

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


def _call(name: str) -> Callable[..., Any]:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._inner, name)(*args, **kwargs)

    return call


def _stream(name: str) -> Callable[..., Any]:
    async def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(getattr(self._inner, name)(*args, **kwargs)) as items:
            async for item in items:
                yield item

    return stream


class LazyEngine(
    LazyReplica,
    target="plait_serving.deployments.images.engine:EngineReplica",
    calls=("refused", "rest", "health", "metric_families", "record_routing_stats", "drain"),
    streams=("generate", "catalog"),
):
    """A lazily built replica of a base model."""


class LazyControlNet(
    LazyReplica,
    target="plait_serving.deployments.images.controlnet:ControlNetDeployment",
    calls=("describe", "metric_families"),
):
    """A lazily built replica of a ControlNet; tensors go over the fabric."""


class LazyRankWorker(
    LazyReplica,
    target="plait_serving.deployments.ranking.worker:RankWorker",
    calls=("describe", "why_not_ready", "metric_families", "stage_update", "switch_version", "drain"),
):
    """A lazily built CN, HN or whole worker of a ranking model; requests go over the fabric."""


LAZY = {of.target: of for of in (LazyEngine, LazyControlNet, LazyRankWorker)}
"""The classes here by those that they stand for."""
