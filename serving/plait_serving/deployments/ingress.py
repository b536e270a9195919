"""The HTTP deployment, and the `ImageService` that speaks to the base model's deployment through a Serve handle."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException, RequestCancelledError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait_fabric.turns import take_short_turns
from plait_serving.deployments.direct import Direct, DirectListener
from plait_serving.deployments.logs import configure_logging
from plait_serving.deployments.ranking_source import RankSource
from plait_serving.diffusion.errors import Cancelled, EngineError, EngineStopped, Overloaded
from plait_serving.diffusion.values import Event, Failed, Finished, ImageRequest, Preview
from plait_serving.http.context import HttpSettings
from plait_serving.images.service import Catalog, Health

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

    from plait_serving.ranking.service import Recommender

_log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0
"""A replica that takes longer to say that it is well is not."""


class HandleImageService:
    """All calls of the base model's handle are made here; Serve's errors become the engine's."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True)

    async def catalog(self) -> Catalog:
        """See ImageService."""
        catalog = await self._call("catalog")
        assert isinstance(catalog, Catalog)
        return catalog

    async def metrics_text(self) -> str:
        """See ImageService."""
        return str(await self._call("metrics_text"))

    async def health(self) -> Health:
        """See ImageService. No replica, or one that does not answer, is a reason and no error."""
        try:
            health = await asyncio.wait_for(self._call("health"), HEALTH_TIMEOUT_S)
        except TimeoutError:
            return Health(ready=False, reason=f"no engine replica answered within {HEALTH_TIMEOUT_S:g} s")
        except EngineError as error:
            return Health(ready=False, reason=error.message)
        assert isinstance(health, Health)
        return health

    async def generate(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """See ImageService. If the replica dies, the request is made once more: a seed gives the same picture."""
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
        """One attempt. Leaving early cancels the call, and with it the work."""
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
    """The replica that had the request is gone."""


def translate(error: Exception) -> EngineError:
    """What an error of Ray or Serve means to a caller."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """What the ingress must know of a recommendation model besides its workers' handle: there are ``replicas`` or more,
    up to ``most_replicas``."""

    source: RankSource
    replicas: int
    most_replicas: int


class Ingress:
    """The HTTP face as a deployment; wrap it with `ray.serve.ingress()`, which builds the app in the replica."""

    def __init__(
        self,
        engine: Any,
        settings: Callable[[], HttpSettings],
        rankers: Mapping[str, Any] | None = None,
        rank_models: Mapping[str, RankModel] | None = None,
        hns: Mapping[str, Any] | None = None,
        *,
        routers: Callable[[], Sequence[APIRouter]] = tuple,
        direct: Direct | None = None,
    ) -> None:
        """``engine``: the base model's handle, or None. ``rankers``: handles of the recommendation models' workers by
        name; connecting to them goes on after this returned. ``hns``: handles of the HNs of models that have them.
        ``routers``: makes routes that others add to ours, in the replica. ``direct``: where it listens itself, beside
        Serve's proxy."""
        configure_logging("ingress", os.environ)
        take_short_turns()
        self._images = None if engine is None else HandleImageService(engine)
        self._settings = settings
        self._routers = routers
        self._recommenders = _recommenders(rankers or {}, rank_models or {}, hns or {})
        self._answers = OpenAnswers()
        self._direct = None if direct is None else DirectListener(direct)

    def check_health(self) -> None:
        """Serve asks; a replica that raises is started anew."""
        if self._direct is not None and (failure := self._direct.failure) is not None:
            raise RuntimeError(failure)

    async def drain(self, drain_s: float) -> bool:
        """Waits until no request is open, at most ``drain_s``; whether that was reached. Refuses none that comes
        through Serve's proxy."""
        if self._direct is not None:
            self._direct.refuse_new()
        return await self._answers.wait_until_none(drain_s)

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Serve's name for it
        """Serve calls it after the constructor."""
        from plait_serving.http.app import create_app

        app = create_app(
            self._images,
            self._settings(),
            recommenders=self._recommenders,
            routers=self._routers(),
            lifespan=None if self._direct is None else self._answer_directly,
        )
        return self._answers.count(without_request_id(app))

    def _answer_directly(self, app: FastAPI) -> AbstractAsyncContextManager[None]:
        assert self._direct is not None
        return self._direct.answering(self._answers.count(app))


def _recommenders(
    rankers: Mapping[str, Any], models: Mapping[str, RankModel], hns: Mapping[str, Any]
) -> dict[str, Recommender]:
    if not rankers:
        return {}
    from plait_serving.deployments.ranking import remote_ranker
    from plait_serving.deployments.refreshing import ServeRefresh
    from plait_serving.ranking.service import Recommender

    return {
        name: Recommender(
            ranker=remote_ranker(
                name, handle, replicas=models[name].replicas, most_replicas=models[name].most_replicas
            ),
            items=models[name].source.items(),
            refreshes=ServeRefresh(name, models[name].source, handle, hns.get(name)),
        )
        for name, handle in rankers.items()
    }


class OpenAnswers:
    """Counts the requests whose answer is not sent yet."""

    def __init__(self) -> None:
        self._open = 0
        self._none = asyncio.Event()
        self._none.set()

    def count(self, app: ASGIApp) -> ASGIApp:
        """The application, counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            self._open += 1
            self._none.clear()
            try:
                await app(scope, receive, send)
            finally:
                self._open -= 1
                if not self._open:
                    self._none.set()

        return counted

    async def wait_until_none(self, timeout_s: float) -> bool:
        """Waits until the count is 0; False after ``timeout_s``."""
        try:
            await asyncio.wait_for(self._none.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def without_request_id(app: ASGIApp) -> ASGIApp:
    """Takes the application's ``x-request-id`` out of its answers: Serve's proxy appends the same id to every answer,
    and an answer with two would read as "id, id"."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await app(scope, receive, send_without)

    return wrapped
