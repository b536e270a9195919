"""JSON bodies that say everything once.

Of two members with one name most parsers take the last, some the first: a proxy that checks a body and the server
behind it could read different requests. The check is part of the only parse, and costs as much as the body has objects.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from plait_serving.http.edge.errors import ApiError, BodyRefused

__all__ = ["JsonRoute", "parse_json", "read_bytes"]

_LONGEST_NAME = 64
_INLINE_BYTES = 64 << 10
"""Longer bodies are parsed beside the event loop, one after the other: a parser holds the interpreter."""
_PARSER = ThreadPoolExecutor(1, "plait-json")


def parse_json(body: bytes) -> Any:
    """Parse a body. Raises `json.JSONDecodeError`, or `BodyRefused` if an object has two members with one name."""
    return json.loads(body, object_pairs_hook=_object)


def _parse_long(body: bytes) -> Any:
    """Parse without the collector, which would look at all values again for each few hundred new ones."""
    gc.disable()
    try:
        return parse_json(body)
    finally:
        gc.enable()


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(members)
    if len(made) < len(members):
        name = _first_duplicate(members)[:_LONGEST_NAME]
        raise BodyRefused(ApiError(400, f"{name}: the body has it twice", code="duplicate_field", param=name))
    return made


def _first_duplicate(members: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for name, _ in members:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("there is one, or fewer would have been kept")


class _JsonRequest(Request):
    """A request whose `json` refuses what `parse_json` refuses."""

    read_bytes = 0

    async def body(self) -> bytes:
        """Return the body; of JSON, which is parsed at once, only its first byte: while images are made of it, its
        bytes would lie beside its text."""
        if not hasattr(self, "_body"):
            body = await super().body()
            self.read_bytes = len(body)
            kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if body and kind.startswith("application/") and kind.endswith(("/json", "+json")):
                self._json, self._body = await _parsed(body), body[:1]
        return self._body

    async def json(self) -> Any:
        """Return the parsed body."""
        body = await self.body()
        if not hasattr(self, "_json"):
            self._json = await _parsed(body)
        return self._json


async def _parsed(body: bytes) -> Any:
    if len(body) <= _INLINE_BYTES:
        return parse_json(body)
    return await asyncio.get_running_loop().run_in_executor(_PARSER, _parse_long, body)


def read_bytes(request: Request) -> int:
    """Return how long the body was that a `JsonRoute` has read."""
    return request.read_bytes if isinstance(request, _JsonRequest) else 0


class JsonRoute(APIRoute):
    """A route that reads its body with `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler; FastAPI calls this once for each route."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_strictly
