"""Answers a flood where it arrives: for a moment after a tenant was refused, so is all that it asks for; by the
ingress, and before it by Serve's proxy, which repeats a refusal while it stands.

An engine's refusal costs calls into its process, whose interpreter is busy with images. Whether a tenant's queue has
room does not depend on the request (`request_registry`), and it has none again for `retry_after_s`. When the moment is
over a few requests find out whether there is room, and more and more while none of them is refused for as long as
refusals took: if all that come in the meantime went along, each of them would wait for the refusal of each other.

A request that crosses Serve's proxy costs calls between two processes, whatever the ingress does with it, on the cores
that make images. So the ingress marks a refusal that holds for all that a client may send to a path
(`REFUSED_HEADER`), and the proxies that have this middleware give it to the next ones themselves. A request that goes
on says how many did not (`REPEATED_HEADER`), so that the ingress counts them.

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
from typing import Generic, TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait_serving.http.edge.request_id import accepted_id

T = TypeVar("T")

HELD_S = 0.25
"""Room that is made within this time is found late by so much; the engine answers four floods a second and tenant."""

TRY_S, _MAX_TRY_S = 0.05, 2.0
"""About what the engine takes to refuse while it computes; twice what the last refusal took, up to a bound. After each
such time without a refusal twice as many try."""

FIRST_TRIES = 4
_ENOUGH_TRIES = 1024
"""From here on nobody is held up: a process answers fewer requests in `TRY_S`."""

_MAX_NAMES = 4096
"""Refusals that are remembered. Tenants are few; names that nobody has checked may be many."""


@dataclass(slots=True, kw_only=True)
class Refused(Generic[T]):
    """Somebody who was refused at `at_s`, and how many may try and have tried since `since_s`, for `try_s`. `held`: how
    many received it since they were counted."""

    refusal: T
    at_s: float
    since_s: float
    try_s: float
    tries: int = FIRST_TRIES
    tried: int = 0
    held: int = 0


class RecentRefusals(Generic[T]):
    """The newest refusal of each name. For one event loop."""

    def __init__(self, monotonic_s: Callable[[], float], *, max_names: int = _MAX_NAMES) -> None:
        self._monotonic_s = monotonic_s
        self._max_names = max_names
        self._refused: dict[str, Refused[T]] = {}

    def standing(self, name: str) -> Refused[T] | None:
        """Return the refusal if it was a moment ago, or enough others find out whether it still stands; None: ask."""
        refused = self._refused.get(name)
        if refused is None or refused.tries >= _ENOUGH_TRIES:
            return None
        now_s = self._monotonic_s()
        if (periods := int((now_s - refused.since_s) / refused.try_s)) > 0:
            refused.tries <<= min(periods, _ENOUGH_TRIES.bit_length())
            refused.since_s, refused.tried = now_s, 0
            if refused.tries >= _ENOUGH_TRIES:
                return None
        if now_s >= refused.since_s and refused.tried < refused.tries:
            refused.tried += 1
            return None
        refused.held += 1
        return refused

    def held(self, name: str) -> Refused[T] | None:
        """Return the refusal if it was a moment ago, for those that were let through before it."""
        refused = self._refused.get(name)
        if refused is None or self._monotonic_s() >= refused.since_s:
            return None
        refused.held += 1
        return refused

    def note(self, name: str, refusal: T, *, took_s: float = 0.0) -> None:
        """Remember that somebody was refused, and how long that took."""
        now_s = self._monotonic_s()
        before = self._refused.get(name)
        if before is None and len(self._refused) >= self._max_names:
            self._refused = {who: it for who, it in self._refused.items() if now_s < it.since_s + HELD_S}
            if len(self._refused) >= self._max_names:
                return
        held = 0 if before is None else before.held
        try_s = min(max(TRY_S, 2.0 * took_s), _MAX_TRY_S)
        self._refused[name] = Refused(refusal=refusal, at_s=now_s, since_s=now_s + HELD_S, try_s=try_s, held=held)

    def take_held(self, name: str) -> int:
        """Return how many received a refusal since this was asked last."""
        refused = self._refused.get(name)
        if refused is None:
            return 0
        held, refused.held = refused.held, 0
        if refused.tries >= _ENOUGH_TRIES:
            del self._refused[name]
        return held


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
