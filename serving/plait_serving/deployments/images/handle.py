"""The `ImageService` that calls the base model's deployment through a Serve handle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException, RequestCancelledError

from plait_serving.diffusion.errors import Cancelled, EngineError, EngineStopped, Overloaded
from plait_serving.diffusion.values import Event, Failed, Finished, ImageRequest, Preview
from plait_serving.health import Health
from plait_serving.images.service import Catalog

__all__ = ["HandleImageService", "translate"]

_log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0
"""A replica that takes longer than this to report that it is healthy counts as unhealthy."""


CATALOG_TIMEOUT_S = 120.0
"""Every request begins with this call. A replica answers it in milliseconds; one that died and is started again has the
time to load a model."""


class HandleImageService:
    """An `ImageService` over the base model's handle; Serve's errors become the engine's."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True)

    async def catalog(self) -> Catalog:
        """Return the catalog of a replica. Raises `EngineStopped` if none answers within `CATALOG_TIMEOUT_S`: Serve
        would wait for as long as there is no replica."""
        try:
            catalog = await asyncio.wait_for(self._call("catalog"), CATALOG_TIMEOUT_S)
        except TimeoutError as error:
            raise EngineStopped(f"no engine replica answered within {CATALOG_TIMEOUT_S:g} s") from error
        assert isinstance(catalog, Catalog)
        return catalog

    async def metrics_text(self) -> str:
        """Return the metrics of a replica."""
        return str(await self._call("metrics_text"))

    async def health(self) -> Health:
        """Return the health of a replica; if there is none or it does not answer, that is a reason and not an error."""
        try:
            health = await asyncio.wait_for(self._call("health"), HEALTH_TIMEOUT_S)
        except TimeoutError:
            return Health(ready=False, reason=f"no engine replica answered within {HEALTH_TIMEOUT_S:g} s")
        except EngineError as error:
            return Health(ready=False, reason=error.message)
        assert isinstance(health, Health)
        return health

    async def generate(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of a replica. If the replica dies, retry the request once: a seed gives the same image."""
        previews = 0
        for attempt in (1, 2):
            events = self._events(request)
            try:
                async for event in events:
                    if isinstance(event, Preview):
                        if event.index < previews:
                            continue  # the client has it from the first attempt
                        previews = event.index + 1
                    if attempt == 1 and isinstance(event, Failed) and isinstance(event.error, _ReplicaDied):
                        _log.warning("request %s: its engine replica died; once more", request.request_id)
                        break
                    yield event
                    if isinstance(event, Finished | Failed):
                        return
            finally:
                await events.aclose()

    async def _events(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """Make one attempt. Leaving early cancels the call, and with it the work."""
        response = self._stream.generate.remote(request)
        ended = False
        try:
            async for event in response:
                ended = isinstance(event, Finished | Failed)
                yield event
            if not ended:
                yield Failed(error=_ReplicaDied("the engine's replica ended without a result"))
            ended = True
        except (RayError, RayServeException) as error:
            ended = True
            yield Failed(error=translate(error))
        finally:
            if not ended:
                response.cancel()

    async def _call(self, method: str) -> object:
        try:
            return await getattr(self._handle, method).remote()
        except (RayError, RayServeException) as error:
            raise translate(error) from error


class _ReplicaDied(EngineStopped):
    """The replica that had the request died."""


def translate(error: Exception) -> EngineError:
    """Translate an error of Ray or Serve into an engine error for the caller."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, EngineError):
        return error.cause
    if isinstance(error, BackPressureError):
        return Overloaded("too many requests are waiting", retry_after_s=1.0)
    if isinstance(error, TaskCancelledError | RequestCancelledError):
        return Cancelled("the request was cancelled")
    if isinstance(error, DeploymentUnavailableError):
        return EngineStopped("the model could not be loaded; the server's log says why")
    if isinstance(error, RayActorError):
        return _ReplicaDied("the engine's replica died; it is started again")
    _log.error("unexpected error from the engine's deployment", exc_info=error)
    return EngineError("internal error; the engine's log has the details")
