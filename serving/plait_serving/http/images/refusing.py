"""Routes whose tenant may have been refused a moment ago: that is known before a body is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from plait_serving.diffusion.errors import Overloaded
from plait_serving.http.context import RouteContext, get_context
from plait_serving.http.edge.auth import principal
from plait_serving.http.edge.errors import wire_error
from plait_serving.http.edge.json_body import JsonRoute
from plait_serving.http.edge.refusals import StandingRefusal
from plait_serving.http.edge.repeating import REFUSED_HEADER, repeated

__all__ = ["RefusingRoute", "check_again"]

_log = logging.getLogger(__name__)


class RefusingRoute(JsonRoute):
    """A route that answers a tenant whose refusal stands without reading its body, and notes the engine's refusals."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler; FastAPI calls this once for each route."""
        handle = super().get_route_handler()

        async def unless_refused(request: Request) -> Response:
            context, tenant = get_context(request), principal(request).tenant
            if count := repeated(request.headers):
                context.metrics.observe_repeated(request.scope, count)
                _log.info("tenant %s: %d more requests were refused in the proxy", tenant, count)
            if (standing := context.refusals.standing(tenant)) is not None:
                refused = _still(standing)
                context.metrics.observe_failure(refused)
                return _marked(refused, request)
            began_s = context.monotonic_s()
            try:
                return await handle(request)
            except Overloaded as error:
                if not isinstance(error, _StillRefused):
                    context.refusals.note(tenant, error, took_s=context.monotonic_s() - began_s)
                return _marked(error, request)

        return unless_refused


class _StillRefused(Overloaded):
    """A refusal of before, which is not news."""


def check_again(context: RouteContext, tenant: str) -> None:
    """Raise the tenant's refusal if there was one since its request was let through: of many that come at once, the
    first speaks for the others."""
    if (held := context.refusals.held(tenant)) is not None:
        raise _still(held)


def _still(standing: StandingRefusal[Overloaded]) -> _StillRefused:
    """Return a refusal with what is left of its time."""
    error, left_s = standing.refusal, standing.refusal.retry_after_s
    if left_s is not None:
        left_s = max(0.0, left_s - standing.ago_s)
    return _StillRefused(error.message, param=error.param, retry_after_s=left_s)


def _marked(error: Overloaded, request: Request) -> Response:
    response = wire_error(error).response(request.url.path)
    response.headers[REFUSED_HEADER] = "tenant"
    return response
