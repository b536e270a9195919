"""What a tenant may send: so many requests per second, and bodies (and queries) that are not too large, alone or all
together. Who sends more is refused in OpenAI's error form.

Limits are of a tenant, not of a key: all its keys share them. Each ingress replica counts on its own, so with two of
them a tenant may send twice as many requests per second.

A body stays in memory until its request is answered, so a queue of requests with control images could fill the
memory although each of them is within bounds. No tenant holds more than it leaves for others, so that whoever comes
finds room: of one that is alone the bodies may hold half of all, of two a third each.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait_kernels.heap import return_memory
from plait_serving.diffusion.errors import Overloaded
from plait_serving.http.edge.auth import tenant_in
from plait_serving.http.edge.errors import ApiError, BodyRefused
from plait_serving.http.edge.refusals import PACED_PATHS
from plait_serving.sections import TenantLimits

MAX_JSON_VALUES = 300_000
"""Commas and opening brackets in a JSON body: Python makes objects of so many values in some 0.1 s. Two prompts
of the longest kind may have a fifth of it; base64, which makes bodies long, has none."""

MAX_QUERY_BYTES = 2048
"""No route takes more than a number there, and it is taken apart on the event loop for each of them."""

MAX_FORM_PARTS = 16_384
"""Line breaks with two dashes in a form: its parser takes a step of Python for each, part or not."""

_LARGE_BYTES = 8 << 20
"""A heap keeps the pieces of larger ones: some 600 MB of twelve of 59 MB."""

_OTHER_LIMITS = re.compile("/v2/.*/infer")
"""Bodies there may be binary, and have limits of their own."""

_FORMS = "/v1/images/edits"
"""Bodies there may be forms, which hold files, and whose fields have limits of their own."""

_ROUNDING_S = 1e-9


def declared_bytes(scope: Scope) -> int:
    """Return the body's length as its sender declares it; 0 if unknown, a large number if absurd."""
    text = Headers(scope=scope).get("content-length", "")
    return int(text[:20]) if text.isascii() and text.isdigit() else 0


class BodyLimitMiddleware:
    """Refuses a declared length above `max_bytes` unread (413), and a chunked body as soon as it is too long.

    So it refuses a JSON body of more than `MAX_JSON_VALUES`. All bodies together hold at most `max_total_bytes`, and a
    tenant's at most what these leave of it; a request that would exceed it is refused with a 429. What a route
    decompresses from a body counts too: it calls `hold_bytes(size)` of the scope's state, which raises the same.
    """

    def __init__(
        self, app: ASGIApp, *, max_bytes: int, max_total_bytes: int, refused: Callable[[str, str], None]
    ) -> None:
        """`refused` is told of each request for images that has no room: its tenant, and the code of the answer."""
        self._app = app
        self._refused = refused
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._held_bytes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call. Raises a 413 or 415 `ApiError` or `Overloaded` before the body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if len(scope.get("query_string", b"")) > MAX_QUERY_BYTES:
            raise ApiError(414, f"the query is longer than {MAX_QUERY_BYTES} bytes", code="query_too_long")
        declared = declared_bytes(scope)
        tenant = tenant_in(scope)
        self._check(scope, declared, declared)
        received = values = 0
        headers = Headers(scope=scope)
        is_form = scope["path"] == _FORMS and headers.get("content-type", "").lower().startswith("multipart/")
        counts_values = _OTHER_LIMITS.fullmatch(scope["path"]) is None
        marks, max_marks = ((b"\r\n--",), MAX_FORM_PARTS) if is_form else ((b",", b"[", b"{"), MAX_JSON_VALUES)
        encoding = headers.get("content-encoding", "identity")
        if counts_values and encoding.strip().lower() != "identity":
            raise ApiError(415, f"send the body as it is, not in {encoding[:20]!r}", code="unsupported_encoding")

        def hold(size: int, of_body: int = 0) -> None:
            nonlocal received
            self._check(scope, of_body, size)
            received += size
            self._held_bytes[tenant] += size

        async def receive_counted() -> Message:
            nonlocal values
            message = await receive()
            if message["type"] == "http.request":
                body = message.get("body", b"")
                try:
                    hold(len(body), received + len(body))
                    if counts_values:
                        values += sum(body.count(mark) for mark in marks if mark in body)  # which is ten times as quick
                    if values > max_marks:
                        what = f"the body has more than {max_marks:,} values or parts"
                        raise ApiError(413, what, code="body_too_large")
                except (ApiError, Overloaded) as problem:
                    raise BodyRefused(problem) from problem
            return message

        scope.setdefault("state", {})["hold_bytes"] = hold
        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._held_bytes[tenant] -= received
            self._held_bytes = +self._held_bytes  # without those who hold none
            if received >= _LARGE_BYTES:
                asyncio.get_running_loop().run_in_executor(None, return_memory)

    def _check(self, scope: Scope, body_bytes: int, new_bytes: int) -> None:
        """Raise for a body of so many bytes, some of them new."""
        if body_bytes > self._max_bytes:
            raise ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")
        tenant = tenant_in(scope)
        if new_bytes and self._held_bytes.total() + self._held_bytes[tenant] + 2 * new_bytes > self._max_total_bytes:
            if scope["path"] in PACED_PATHS:
                self._refused(tenant, Overloaded.code)
            raise Overloaded("too many large requests are waiting", retry_after_s=2.0)


class TokenBucket:
    """Takes `rate` requests per second, and up to a second's worth at once (at least one)."""

    def __init__(self, rate: float) -> None:
        self._each_s, self._ahead_s = 1.0 / rate, max(1.0, rate) / rate
        self._ends_s = -math.inf

    def take(self, now_s: float) -> float:
        """Take one request; return 0, or the seconds until one can be taken."""
        ends_s = max(now_s, self._ends_s) + self._each_s
        if (wait_s := ends_s - now_s - self._ahead_s) > _ROUNDING_S:
            return wait_s
        self._ends_s = ends_s
        return 0.0


class RateLimits:
    """Refuses a tenant's requests beyond its `requests_per_s` (429)."""

    def __init__(
        self, limits: Mapping[str, TenantLimits], monotonic_s: Callable[[], float], refused: Callable[[str, str], None]
    ) -> None:
        """`refused` is told of each request for images that is refused: its tenant, and the code of the answer."""
        self._monotonic_s = monotonic_s
        self._refused = refused
        self._buckets = {
            name: TokenBucket(one.requests_per_s) for name, one in limits.items() if one.requests_per_s is not None
        }

    def __call__(self, scope: Scope) -> None:
        """Raise a 429 `ApiError` for a request that is one too many."""
        tenant = tenant_in(scope)
        bucket = self._buckets.get(tenant)
        if bucket is not None and (wait_s := bucket.take(self._monotonic_s())) > 0.0:
            code, message = "rate_limited", f"tenant {tenant!r} sends too many requests per second"
            if scope["path"] in PACED_PATHS:
                self._refused(tenant, code)
            raise ApiError(429, message, code=code, headers={"retry-after": str(math.ceil(wait_s))})
