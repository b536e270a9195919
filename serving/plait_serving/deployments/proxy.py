"""What Serve's HTTP proxy runs of ours: the checks that its own routes and its connections otherwise lack, and refusals
that stand.

The proxy answers `/-/routes` and `/-/healthz` itself, to whatever host name it is asked by, and its uvicorn waits for
ever for a request that is never finished. Serve calls the function that `CALLBACK_VARIABLE` names in every proxy that
it starts, before the proxy listens, and puts the middlewares that it returns in front of everything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import uvicorn.config
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from plait_serving.deployments.prompt_protocol import PromptHttpProtocol
from plait_serving.http.edge.errors import ApiError, wire_error
from plait_serving.http.edge.hosts import HostMiddleware
from plait_serving.http.edge.repeating import RepeatMiddleware

__all__ = ["CALLBACK_VARIABLE", "HOSTS_VARIABLE", "OwnRoutesMiddleware", "configure_proxy", "proxy_environment"]

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
HOSTS_VARIABLE = "PLAIT_PROXY_HOSTS"
"""The host names that the server answers to, with commas; empty or unset: any."""

_OWN_ROUTES = "/-/"


def proxy_environment(hosts: Sequence[str]) -> Mapping[str, str]:
    """Return the environment in which a Ray must be started whose proxies are to be ours."""
    return {CALLBACK_VARIABLE: f"{__name__}.{configure_proxy.__name__}", HOSTS_VARIABLE: ",".join(hosts)}


def configure_proxy() -> list[Middleware]:
    """Prepare this process for the proxy that is about to be made in it, and return its middlewares."""
    module, name = PromptHttpProtocol.__module__, PromptHttpProtocol.__qualname__
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{module}:{name}"
    hosts = tuple(filter(None, os.environ.get(HOSTS_VARIABLE, "").split(",")))
    checked = [Middleware(OwnRoutesMiddleware, hosts=hosts)] if hosts else []
    return [*checked, Middleware(RepeatMiddleware)]


class OwnRoutesMiddleware:
    """Refuses the proxy's own routes under a foreign host name; the ingress checks all others itself."""

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str]) -> None:
        self._app = app
        self._checked = HostMiddleware(app, hosts=hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call."""
        if scope["type"] != "http" or not scope["path"].startswith(_OWN_ROUTES):
            await self._app(scope, receive, send)
            return
        try:
            await self._checked(scope, receive, send)
        except ApiError as error:
            await wire_error(error).response(scope["path"])(scope, receive, send)
