"""Serve's proxy repeats a refusal while it stands, instead of asking the ingress for each one.

A request that crosses Serve's proxy costs calls between two processes, whatever the ingress does with it, on the cores
that make images. So the ingress marks a refusal that holds for all that a client may send to a path
(`REFUSED_HEADER`), and the proxies that have this middleware give it to the next ones themselves, by the rules of
`refusals.py`. A request that goes on says how many did not (`REPEATED_HEADER`), so that the ingress counts them.

Of many requests for images that come at once a few go ahead, and the others at a pace (`RequestPace`): they would all
have crossed by the time that the first is refused. One that is refused for what it says counts as many: to read it
costs as much as any, and eight clients that ask again at once would have the time of half the images.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait_serving.http.edge.refusals import RecentRefusals, Refused
from plait_serving.http.edge.request_id import accepted_id

REFUSED_HEADER = "x-plait-refused"
REPEATED_HEADER = "x-plait-repeated"
_REFUSED, _REPEATED = REFUSED_HEADER.encode(), REPEATED_HEADER.encode()
_ID = b"x-request-id"

_DECIDE = frozenset({b"authorization", b"host", b"origin", b"sec-fetch-site"})
"""The headers that decide whose a request is and whether it is heard: who sends others may be answered otherwise."""

IMAGE_PATHS = frozenset({"/v1/images/generations", "/v1/images/edits"})
PACED_PATHS = IMAGE_PATHS | {"/sdapi/v1/txt2img", "/sdapi/v1/img2img"}
"""Whose requests take so long that nobody notices a pace."""

_AT_ONCE = 32
_PER_S = 100.0
"""More than an engine makes images, and about what proxy and ingress pass on beside one on two cores."""

_REFUSED_AS, _MAX_DEBT_S = 10, 1.0
"""As how many requests a refusal counts, and how long whoever is refused again and again waits for that at most."""

_LOOK_S = 0.1
"""How often who waits for his turn looks whether he is refused."""

_MAX_BODY_BYTES = 16 << 10
_MAX_REPEATED = 10**7


@dataclass(frozen=True, slots=True)
class _Answer:
    """A response without its request id."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class RequestPace:
    """Lets `at_once` requests of a name go ahead at once, and then `per_s` each second. Pure; bounded in names."""

    def __init__(self, *, at_once: int = _AT_ONCE, per_s: float = _PER_S, max_names: int = 4096) -> None:
        self._ahead_s, self._each_s, self._max_names = at_once / per_s, 1.0 / per_s, max_names
        self._ends_s: dict[str, float] = {}

    def wait_s(self, name: str, now_s: float) -> float:
        """Return how long one more request of a name has to wait."""
        if name not in self._ends_s and len(self._ends_s) >= self._max_names:
            self._ends_s = {who: ends_s for who, ends_s in self._ends_s.items() if ends_s > now_s}
        ends_s = self._ends_s[name] = max(now_s, self._ends_s.get(name, now_s)) + self._each_s
        wait_s = ends_s - now_s - self._ahead_s
        return wait_s if wait_s > self._each_s / 2 else 0.0

    def refused(self, name: str, now_s: float) -> None:
        """Count a request of a name as `_REFUSED_AS` more; the next one waits `_MAX_DEBT_S` for such at most."""
        ends_s, last_s = self._ends_s.get(name, math.inf), now_s + self._ahead_s + _MAX_DEBT_S
        if ends_s < last_s:
            self._ends_s[name] = min(max(now_s, ends_s) + _REFUSED_AS * self._each_s, last_s)


class RepeatMiddleware:
    """Repeats marked refusals of POST requests, by path and by what says whose a request is; removes the mark."""

    def __init__(self, app: ASGIApp, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._monotonic_s = monotonic_s
        self._refusals: RecentRefusals[_Answer] = RecentRefusals(monotonic_s)
        self._pace = RequestPace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        name = _name_of(scope)
        standing = self._refusals.standing(name) or await self._refused_on_the_way(name, scope["path"])
        if standing is not None:
            await _repeat(standing.refusal, scope, send)
            return
        passed = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != _REPEATED]}
        if held := self._refusals.take_held(name):
            passed["headers"].append((_REPEATED, str(held).encode()))
        await self._app(passed, receive, self._noting(name, send))

    async def _refused_on_the_way(self, name: str, path: str) -> Refused[_Answer] | None:
        """Wait for the request's turn; return the refusal that came before it."""
        wait_s = self._pace.wait_s(name, self._monotonic_s()) if path in PACED_PATHS else 0.0
        while wait_s > 0.0:
            await asyncio.sleep(min(wait_s, _LOOK_S))
            wait_s -= _LOOK_S
            if (held := self._refusals.held(name)) is not None:
                return held
        return None

    def _noting(self, name: str, send: Send) -> Send:
        """Have refusals be counted, and a marked one be noted once it is whole."""
        began_s, body = self._monotonic_s(), b""
        start: Message | None = None

        async def send_noting(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0].lower() != _REFUSED]
                is_marked, status = len(kept) < len(message["headers"]), message["status"]
                message = {**message, "headers": kept}
                start = message if is_marked else None
                if 400 <= status < 500 and status != 429:
                    self._pace.refused(name, self._monotonic_s())
            elif start is not None and message["type"] == "http.response.body":
                body += message.get("body", b"")
                if len(body) > _MAX_BODY_BYTES:
                    start = None
                elif not message.get("more_body", False):
                    headers = tuple(pair for pair in start["headers"] if pair[0].lower() != _ID)
                    answer = _Answer(start["status"], headers, body)
                    self._refusals.note(name, answer, took_s=self._monotonic_s() - began_s)
            await send(message)

        return send_noting


def _name_of(scope: Scope) -> str:
    """Return a digest: no proxy keeps a key."""
    said = (name + b":" + value for name, value in scope["headers"] if name in _DECIDE)
    return hashlib.sha256(b"\n".join((scope["path"].encode("utf-8", "surrogatepass"), *said))).hexdigest()


async def _repeat(answer: _Answer, scope: Scope, send: Send) -> None:
    headers = [*answer.headers, (_ID, accepted_id(scope).encode("ascii"))]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def repeated(headers: Headers) -> int:
    """Return how many refusals a proxy repeated since it passed on the last such request."""
    text = headers.get(REPEATED_HEADER, "")
    return min(int(text[:9]), _MAX_REPEATED) if text.isascii() and text.isdigit() else 0


def without_repeated(app: ASGIApp) -> ASGIApp:
    """Wrap the application for a listener with no proxy before it: nobody is to be believed who says so."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != _REPEATED]}
        await app(scope, receive, send)

    return wrapped
