"""A deployment class whose module is imported where it runs, not where the application is built.

Whoever builds the application (the command, Serve's builder task) needs no torch; importing it there would cost some
seconds and half a gigabyte.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from plait_serving.deployments.threads import choose_omp_wait, take_threads_back
from plait_serving.ranking.config import OmpWait


class _Lazy:
    """What every such class has. ``_path``: ``module:class`` of what it stands for."""

    _path: ClassVar[str]

    def __init__(self, **arguments: Any) -> None:
        take_threads_back(os.environ)
        module, _, name = self._path.partition(":")
        self._inner = getattr(import_module(module), name)(**arguments)

    async def describe(self) -> Any:
        """Where this replica can be reached."""
        return await self._inner.describe()

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Applies new knobs."""
        self._inner.reconfigure(user_config)

    def check_health(self) -> None:
        """Raises if it should be replaced."""
        self._inner.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_inner"):
            self._inner.__del__()


class LazyControlNet(_Lazy):
    """`plait_serving.deployments.controlnet.ControlNetDeployment`, which see, imported in its replica."""

    _path = "plait_serving.deployments.controlnet:ControlNetDeployment"

    async def statistics(self) -> Mapping[str, float]:
        """Its numbers."""
        numbers: Mapping[str, float] = await self._inner.statistics()
        return numbers


class LazyRankWorker(_Lazy):
    """`plait_serving.deployments.ranking.RankWorker`, which see, imported in its replica."""

    _path = "plait_serving.deployments.ranking:RankWorker"

    def __init__(self, *, omp_wait: OmpWait, **arguments: Any) -> None:
        choose_omp_wait(os.environ, omp_wait)
        super().__init__(**arguments)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What scaling goes by."""
        signals: dict[str, float] = await self._inner.record_autoscaling_stats()
        return signals

    async def metrics(self) -> Mapping[str, float]:
        """Its numbers."""
        numbers: Mapping[str, float] = await self._inner.metrics()
        return numbers

    async def stage_update(self, folder: str) -> Exception | None:
        """Makes an update ready; returns what went wrong."""
        error: Exception | None = await self._inner.stage_update(folder)
        return error

    async def switch_version(self, version: str) -> Exception | None:
        """Serves the version; returns what went wrong."""
        error: Exception | None = await self._inner.switch_version(version)
        return error

    async def drain(self, drain_s: float) -> None:
        """Finishes what runs."""
        await self._inner.drain(drain_s)
