"""The deployment of a base model: a thin Serve class around one engine.

Everything that Serve does with the engine is here; the engine itself does not depend on Serve.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from plait_serving.cores import declare_thread_cap
from plait_serving.deployments.images.catalog_pieces import Accepted, CatalogHead, CatalogPacker
from plait_serving.deployments.process import configure_logging, seconds_to_start, shorten_gil_interval
from plait_serving.deployments.scaling import PRESSURE
from plait_serving.diffusion.errors import EngineError, EngineStopped
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.values import Event, Failed, ImageRequest, Progress
from plait_serving.health import Health
from plait_serving.replica_metrics import ReplicaMetrics

if TYPE_CHECKING:
    from plait_serving.deployments.images.hosted import HostedImages  # which needs torch

PROGRESS_PERIOD_S = 0.1
"""The min interval between progress events: each costs both replicas about a millisecond, a batch has one per
request and step, and nobody reads them that fast. Where nobody reads them at all, only the first crosses: it tells that
the request survived a step."""


class EngineReplica:
    """One replica. Image requests are answered as streams of events, everything else as plain calls."""

    def __init__(self, source: Callable[[Mapping[str, Any]], HostedImages], controlnets: Mapping[str, Any]) -> None:
        """Make the engine: `source` does, of Serve's handles of ControlNets by name."""
        configure_logging("engine", os.environ)
        shorten_gil_interval()
        self._stopping = False
        self._hosted = source(controlnets)
        self._packer = CatalogPacker(seconds_to_start())

    async def generate(self, request: ImageRequest) -> AsyncGenerator[Event | Accepted, None]:
        """Yield `Accepted` and the request's events, `Finished` or `Failed` last. Cancelling the call cancels the
        request."""
        if self._stopping:
            yield Failed(error=EngineStopped("the server is stopping"))
            return
        yield Accepted()
        reported_s = -math.inf
        async with aclosing(self._hosted.generate(request)) as events:
            async for event in events:
                if isinstance(event, Progress):
                    period_s = PROGRESS_PERIOD_S if request.wants_progress else math.inf
                    if time.monotonic() - reported_s < period_s:
                        continue
                    reported_s = time.monotonic()
                yield portable(event)

    async def catalog(self, known: str) -> AsyncGenerator[CatalogHead | bytes, None]:
        """Yield what can be requested now, in pieces; only its head if its digest is `known`."""
        catalog = await self._hosted.catalog()
        for piece in self._packer.pieces(catalog, known):
            yield piece

    async def refused(self) -> Mapping[str, str]:
        """Return why models are not served, by name."""
        return (await self._hosted.catalog()).refused

    async def rest(self, model: str, asleep: bool) -> None:  # Serve passes arguments by place
        """Let a model's weights leave memory, or bring them back."""
        await self._hosted.rest(model, asleep=asleep)

    async def health(self) -> Health:
        """Return ready while the engine is alive and no stop was requested."""
        if self._stopping:
            return Health(ready=False, reason="the server is stopping")
        return await self._hosted.health()

    async def metric_families(self) -> ReplicaMetrics:
        """Return the engine's metrics."""
        (counted,) = await self._hosted.counts()
        return counted

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this replica's pressure; Serve collects it where the number of replicas follows the load."""
        return {PRESSURE: self._hosted.pressure()}

    async def record_routing_stats(self) -> Mapping[str, Any]:
        """Return by what `ModelRouter` sends requests here; Serve calls this where that is the router."""
        return self._hosted.routing_state().report()

    async def drain(self, drain_s: float) -> None:
        """Refuse new requests from now on; return when nothing runs any more, at the latest after `drain_s`."""
        self._stopping = True
        await asyncio.to_thread(self._hosted.stop, drain_s=drain_s)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply `user_config`; Serve calls this after the constructor and on every change. Raises on a bad knob."""
        knobs = EngineKnobs.model_validate(dict(user_config))
        self._hosted.reconfigure(knobs)
        declare_thread_cap(knobs.threads)

    def check_health(self) -> None:
        """Raise if the replica is unhealthy. Serve calls this every few seconds and replaces a replica that keeps
        raising."""
        if self._stopping:
            return
        if not self._hosted.engine.alive:
            raise RuntimeError("the engine's compute thread has died")
        self._hosted.engine.check_progress()

    def __del__(self) -> None:
        """Stop the engine; Serve calls this once the running requests have ended or the grace period has passed."""
        if not self._stopping and hasattr(self, "_hosted"):
            self._stopping = True
            self._hosted.stop(drain_s=0.0)


def portable(event: Event) -> Event:
    """Return an event that survives pickling: an unexpected error, which the engine has logged, may hold anything."""
    if isinstance(event, Failed) and not isinstance(event.error, EngineError):
        return Failed(
            error=EngineError(f"internal error ({type(event.error).__name__}); the engine's log has the details")
        )
    return event
