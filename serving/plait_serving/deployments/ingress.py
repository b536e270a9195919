"""The HTTP deployment, in front of those that hold models."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait_fabric.gil import shorten_gil_interval
from plait_serving.deployments.direct import Direct, DirectListener
from plait_serving.deployments.images.handle import HandleImageService
from plait_serving.deployments.logs import configure_logging
from plait_serving.deployments.ranking.source import RankModel
from plait_serving.http.context import HttpSettings

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

    from plait_serving.ranking.service import RankingService

_log = logging.getLogger(__name__)


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
        shorten_gil_interval()
        self._images = None if engine is None else HandleImageService(engine)
        self._settings = settings
        self._routers = routers
        self._ranking = _ranking_service(rankers or {}, rank_models or {}, hns or {})
        self._answers = OpenResponses()
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
            ranking=self._ranking,
            routers=self._routers(),
            lifespan=None if self._direct is None else self._answer_directly,
        )
        return self._answers.count(without_request_id(app))

    def _answer_directly(self, app: FastAPI) -> AbstractAsyncContextManager[None]:
        assert self._direct is not None
        return self._direct.answering(self._answers.count(app))


def _ranking_service(
    rankers: Mapping[str, Any], models: Mapping[str, RankModel], hns: Mapping[str, Any]
) -> RankingService | None:
    """None on a server of images alone, which does without torch."""
    if not rankers:
        return None
    from plait_serving.deployments.ranking.service import remote_ranking_service

    return remote_ranking_service(rankers, models, hns)


class OpenResponses:
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
