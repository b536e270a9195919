"""The deployment of a base model: a thin Serve class around one engine.

Everything that Serve does with the engine happens here; what the engine does, it does without Serve.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from plait_serving.deployments.images.source import EngineSource
from plait_serving.deployments.logs import configure_logging
from plait_serving.diffusion.errors import EngineError, EngineStopped
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.values import Event, Failed, ImageRequest, Progress
from plait_serving.health import Health
from plait_serving.images.service import Catalog

_log = logging.getLogger(__name__)

PROGRESS_PERIOD_S = 0.1
"""Every event costs both replicas about a millisecond, and a batch has one per request and step: nobody reads them so
fast."""


class EngineReplica:
    """One replica. Requests come in as streams of events, everything else as plain calls."""

    def __init__(self, source: EngineSource, controlnets: Mapping[str, Any]) -> None:
        configure_logging("engine", os.environ)
        self._stopping = False
        self._hosted = source.open(controlnets)

    async def generate(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """The request's events, `Finished` or `Failed` last. Cancelling the call cancels the request."""
        if self._stopping:
            yield Failed(error=EngineStopped("the server is stopping"))
            return
        events = self._hosted.service.generate(request)
        told_s = -PROGRESS_PERIOD_S
        try:
            async for event in events:
                if isinstance(event, Progress):
                    if time.monotonic() - told_s < PROGRESS_PERIOD_S:
                        continue
                    told_s = time.monotonic()
                yield portable(event)
        finally:
            await events.aclose()

    async def catalog(self) -> Catalog:
        """What can be asked for now."""
        return await self._hosted.service.catalog()

    async def health(self) -> Health:
        """Ready while the engine lives and no stop was asked for."""
        if self._stopping:
            return Health(ready=False, reason="the server is stopping")
        return await self._hosted.service.health()

    async def metrics_text(self) -> str:
        """The engine's metrics in Prometheus' text format."""
        return await self._hosted.service.metrics_text()

    async def drain(self, drain_s: float) -> None:
        """Refuses new requests from now on; returns when nothing runs any more, after ``drain_s`` at the latest."""
        self._stopping = True
        await asyncio.to_thread(self._hosted.stop, drain_s=drain_s)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve calls it after the constructor and whenever ``user_config`` changes. Raises on a bad knob."""
        self._hosted.reconfigure(EngineKnobs.model_validate(dict(user_config)))

    def check_health(self) -> None:
        """Serve calls it every few seconds and replaces the replica when it keeps raising."""
        if not self._stopping and not self._hosted.alive:
            raise RuntimeError("the engine's compute thread has died")

    def __del__(self) -> None:
        """Serve calls it after the running requests ended or the grace period passed."""
        if not self._stopping and hasattr(self, "_hosted"):
            self._stopping = True
            self._hosted.stop(drain_s=0.0)


def portable(event: Event) -> Event:
    """An event that survives pickling: the error of a bug may hold anything, so only its text goes on."""
    if isinstance(event, Failed) and not isinstance(event.error, EngineError):
        _log.error("a request failed unexpectedly", exc_info=event.error)
        return Failed(
            error=EngineError(f"internal error ({type(event.error).__name__}); the engine's log has the details")
        )
    return event
