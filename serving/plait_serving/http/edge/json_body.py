"""JSON bodies that say everything once, and nothing unknown.

Of two members with one name most parsers take the last, some the first: a proxy that checks a body and the server
behind it could read different requests. The check is part of the only parse, and costs as much as the body has objects.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import islice
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from plait_serving.http.edge.auth import tenant_in
from plait_serving.http.edge.errors import ApiError, BodyRefused, ClientDisconnected
from plait_serving.http.edge.turn_threads import READING
from plait_serving.ranking.codec import named_twice

MAX_DEADLINE_MS = 24 * 3_600_000
_MAX_UNKNOWN = 16
_INLINE_BYTES = 64 << 10
"""Longer bodies are parsed beside the event loop, one after the other (`turn_threads.READING`)."""


def parse_json(text: bytes) -> Any:
    """Parse JSON. Raises `ValueError` or `RecursionError`, or `BodyRefused` if an object has two members with one
    name."""
    return json.loads(text, object_pairs_hook=_object)


def _parse_body(pieces: list[bytes]) -> Any:
    """Parse a body. Raises `BodyRefused`."""
    try:
        return parse_json(b"".join(pieces))
    except json.JSONDecodeError as error:
        problem = f"the body is not JSON: {error.msg}"
    except (ValueError, RecursionError):
        problem = "the body could not be read as JSON"
    raise BodyRefused(ApiError(400, problem, code="invalid_json"))


def _parse_long(pieces: list[bytes]) -> Any:
    gc.disable()  # the collector would look at all values again for each few hundred new ones
    try:
        return _parse_body(pieces)
    finally:
        gc.enable()


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(members)
    if len(made) < len(members):
        name = named_twice(members)
        raise BodyRefused(ApiError(400, f"{name}: the body has it twice", code="duplicate_field", param=name))
    return made


class _JsonRequest(Request):
    """A request whose `json` raises `BodyRefused` for what is none, or says something twice."""

    async def body(self) -> bytes:
        """Return the body; of JSON, which is parsed at once, only its first byte: while images are made of it, its
        bytes would lie beside its text."""
        if not hasattr(self, "_body"):
            kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind.startswith("application/") and kind.endswith(("/json", "+json")):
                pieces = [piece async for piece in self.stream() if piece]
                if pieces:
                    self._json = await self._parsed(pieces)
                self._body = pieces[0][:1] if pieces else b""
            else:
                await super().body()
        return self._body

    async def json(self) -> Any:
        """Return the parsed body."""
        body = await self.body()
        if not hasattr(self, "_json"):
            self._json = await self._parsed([body])
        return self._json

    async def _parsed(self, pieces: list[bytes]) -> Any:
        if sum(map(len, pieces)) <= _INLINE_BYTES:
            return _parse_body(pieces)
        return await READING.run(tenant_in(self.scope), partial(_parse_long, pieces))


class JsonRoute(APIRoute):
    """A route that reads its body with `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler; FastAPI calls this once for each route."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            try:
                return await handle(_JsonRequest(request.scope, request.receive))
            except (ClientDisconnect, HTTPException) as error:
                if isinstance(error.__cause__ or error, ClientDisconnect):
                    raise ClientDisconnected from error  # in the middle of the body
                raise

        return handle_strictly


class StrictBody(BaseModel):
    """A body whose unknown fields are refused, and whose numbers are strict: `true` is not 1, `"20"` is not 20."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, data: Any) -> Any:
        """Keep a few of very many unknown fields: pydantic makes an error of each one."""
        if not isinstance(data, dict) or len(data) <= len(cls.model_fields) + _MAX_UNKNOWN:
            return data
        unknown = islice((name for name in data if name not in cls.model_fields), _MAX_UNKNOWN)
        return {name: data[name] for name in (*cls.model_fields, *unknown) if name in data}
