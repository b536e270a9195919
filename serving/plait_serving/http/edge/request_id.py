"""The outermost layer: gives each request its id, has it checked, logs it when it ends, and answers all errors."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait_disagg.request_log import work_for
from plait_serving.http.edge.auth import RESULTS
from plait_serving.http.edge.errors import wire_error

access_log = logging.getLogger("plait.http.access")

# Anything else in a header that is copied around (logs, other services' URLs) is an injection waiting to happen.
ACCEPTED = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ID = b"x-request-id"

ENDED = "ended"
"""Under this key routes put the status as which a stream ended into its request's state."""

_PLAIN = "/-._~!$&'()*+,;=:@"
"""What a path may hold unquoted (RFC 3986). Decoded line breaks in it would forge lines of the log."""
_LONGEST_PATH = 500


def accepted_id(scope: Scope) -> str:
    """Return a request's own id if it is well-formed, otherwise a new one, which cannot be guessed."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if ACCEPTED.fullmatch(given) is not None else f"req_{secrets.token_hex(12)}"


def set_id(headers: list[tuple[bytes, bytes]]) -> None:
    """Put a request's `accepted_id` into its headers: else whoever reads a malformed one makes one of his own."""
    accepted = accepted_id({"headers": headers})
    headers[:] = [*(pair for pair in headers if pair[0] != _ID), (_ID, accepted.encode("ascii"))]


class RequestIdMiddleware:
    """Accepts a well-formed `x-request-id`, makes one otherwise, and echoes it on every response.

    Puts `request_id` into the scope's state. Each of `checks`, in this order, may change the scope or raise an
    `ApiError`, before the body is read. `observe(scope, status, seconds)` is called when the response has been
    sent, with the status as which it ended: 499 where the client went away before all of it was there, and of a stream
    whatever its route says (`ENDED`).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        checks: Sequence[Callable[[Scope], None]],
        observe: Callable[[Scope, int, float], None],
    ) -> None:
        self._app, self._checks, self._observe = app, checks, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = accepted_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status, is_whole, started_s = 499, False, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        work_for(lambda: (request_id,))  # to the end of its task
        try:
            for check in self._checks:
                check(scope)
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # ours, or an unexpected one, which wire_error logs
            answer = wire_error(error)
            if status == 499:
                await answer.response(scope["path"])(scope, receive, send_with_id)
            elif not is_whole:
                scope["state"][ENDED] = answer.status
            error.__traceback__ = None  # else frames with a task that holds it stay, and with them the body
        finally:
            status = scope["state"].get(ENDED, status if is_whole else 499)
            seconds = time.monotonic() - started_s
            self._observe(scope, status, seconds)
            path = quote(_public(scope["path"])[:_LONGEST_PATH], safe=_PLAIN)[:_LONGEST_PATH]
            access_log.info("%s %s %d %.3fs %s", scope["method"], path, status, seconds, request_id)


def _public(path: str) -> str:
    """Return a path without the name of a kept image: whoever knows that gets the image."""
    return RESULTS + "..." if path.startswith(RESULTS) else path
