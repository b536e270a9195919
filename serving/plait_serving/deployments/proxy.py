"""What Serve's HTTP proxy runs of ours: the checks that its own routes and its connections otherwise lack, refusals
that stand, and the form of its own answers.

The proxy answers `/-/routes` and `/-/healthz` itself, to whatever host name it is asked by, and its uvicorn waits for
ever for a request that is never finished. Serve calls the function that `CALLBACK_VARIABLE` names in every proxy that
it starts, before the proxy listens, and puts the middlewares that it returns in front of everything.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus

import uvicorn.config
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait_serving.deployments.prompt_protocol import PromptHttpProtocol
from plait_serving.deployments.ray_internals import replace_proxy_queue
from plait_serving.http.edge.errors import ApiError
from plait_serving.http.edge.hosts import HostCheck
from plait_serving.http.edge.refusals import RepeatMiddleware
from plait_serving.http.edge.request_id import accepted_id
from plait_serving.http.edge.sse import error_event

_log = logging.getLogger(__name__)

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
HOSTS_VARIABLE = "PLAIT_PROXY_HOSTS"
"""The host names that the server answers to, with commas; empty or unset: any."""

_FORWARDED_VARIABLE = "FORWARDED_ALLOW_IPS"
"""Whom uvicorn believes about `X-Forwarded-*`."""
_OWN_ROUTES = "/-/"
_PLAIN, _EVENTS = b"text/plain", b"text/event-stream"  # nothing of ours says in plain text that something failed

_LOST = ApiError(
    503,
    "the server lost this request on its way; it may be asked again",
    code="request_lost",
    headers={"retry-after": "1"},
)


def proxy_environment(hosts: Sequence[str]) -> Mapping[str, str]:
    """Return the environment in which a Ray must be started whose proxies are to be ours."""
    return {CALLBACK_VARIABLE: f"{__name__}.{configure_proxy.__name__}", HOSTS_VARIABLE: ",".join(hosts)}


def configure_proxy() -> list[Middleware]:
    """Prepare this process for the proxy that is about to be made in it, and return its middlewares."""
    from plait_serving.deployments.proxy_bodies import GatheringMiddleware, PacedQueue

    os.environ[_FORWARDED_VARIABLE] = ""  # the ingress reads what trusted proxies say; uvicorn would believe this host
    replace_proxy_queue(PacedQueue)
    module, name = PromptHttpProtocol.__module__, PromptHttpProtocol.__qualname__
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{module}:{name}"
    hosts = tuple(filter(None, os.environ.get(HOSTS_VARIABLE, "").split(",")))
    checked = [Middleware(OwnRoutesMiddleware, hosts=hosts)] if hosts else []
    return [*checked, Middleware(AnsweringMiddleware), Middleware(GatheringMiddleware), Middleware(RepeatMiddleware)]


class OwnRoutesMiddleware:
    """Refuses the proxy's own routes under a foreign host name; the ingress checks all others itself."""

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str]) -> None:
        self._app = app
        self._check = HostCheck(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call."""
        try:
            if scope["type"] == "http" and scope["path"].startswith(_OWN_ROUTES):
                self._check(scope)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class AnsweringMiddleware:
    """Answers in the API's form where the proxy has no answer, or one in plain text: the ingress died with the request,
    or is not to be found. A stream of events that it has begun ends with the event of an error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call."""
        if scope["type"] != "http" or scope["path"].startswith(_OWN_ROUTES):
            await self._app(scope, receive, send)
            return
        request_id = accepted_id(scope)
        has_begun = is_dropped = has_open_events = False

        async def send_formed(message: Message) -> None:
            nonlocal has_begun, is_dropped, has_open_events
            if message["type"] == "http.response.start":
                is_dropped = message["status"] >= HTTPStatus.BAD_REQUEST and _is_typed(message["headers"], _PLAIN)
                has_begun = not is_dropped
                has_open_events = _is_typed(message["headers"], _EVENTS)
            elif not message.get("more_body", False):
                has_open_events = False
            if not is_dropped:
                await send(message)

        try:
            await self._app(scope, receive, send_formed)
        except Exception:
            if has_begun and not has_open_events:
                raise
            _log.exception("request %s had no answer, or no end", request_id)
        if has_open_events:  # of which each message has whole ones
            await send({"type": "http.response.body", "body": error_event(_LOST.body), "more_body": False})
        elif not has_begun:
            answer = _LOST.response(scope["path"])
            answer.headers["x-request-id"] = request_id
            await answer(scope, receive, send)


def _is_typed(headers: Iterable[tuple[bytes, bytes]], media_type: bytes) -> bool:
    """Return whether an answer says that it is of a media type."""
    return any(name.lower() == b"content-type" and value.startswith(media_type) for name, value in headers)
