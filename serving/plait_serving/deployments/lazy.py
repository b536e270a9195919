"""A deployment class whose module is imported where it runs, not where the application is built.

Whoever builds the application (the command, Serve's builder task) needs no torch; importing it there would cost some
seconds and half a gigabyte.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from plait_serving.deployments.threads import take_threads_back


class LazyControlNet:
    """`plait_serving.deployments.controlnet.ControlNetDeployment`, which see, imported in its replica."""

    def __init__(self, **arguments: Any) -> None:
        take_threads_back(os.environ)
        from plait_serving.deployments.controlnet import ControlNetDeployment

        self._inner = ControlNetDeployment(**arguments)

    async def describe(self) -> Any:
        """Where this replica can be reached."""
        return await self._inner.describe()

    async def statistics(self) -> dict[str, float]:
        """Its numbers."""
        return await self._inner.statistics()

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Applies new knobs."""
        self._inner.reconfigure(user_config)

    def check_health(self) -> None:
        """Raises if it should be replaced."""
        self._inner.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_inner"):
            self._inner.__del__()


class LazyRankWorker:
    """`plait_serving.deployments.recommend.RankWorker`, which see, imported in its replica."""

    def __init__(self, **arguments: Any) -> None:
        take_threads_back(os.environ)
        from plait_serving.deployments.recommend import RankWorker

        self._inner = RankWorker(**arguments)

    async def describe(self) -> Any:
        """Where this replica can be reached."""
        return await self._inner.describe()

    async def metrics(self) -> Mapping[str, float]:
        """Its numbers."""
        return await self._inner.metrics()

    async def drain(self, drain_s: float) -> None:
        """Finishes what runs."""
        await self._inner.drain(drain_s)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Applies new knobs."""
        self._inner.reconfigure(user_config)

    def check_health(self) -> None:
        """Raises if it should be replaced."""
        self._inner.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_inner"):
            self._inner.__del__()
