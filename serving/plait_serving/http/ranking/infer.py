"""`POST /v2/models/{model}[/versions/{version}]/infer`, as a bare ASGI application.

The hot path of ranking: no body model, no dependency injection, no response object; each of them costs more than a
small model's lookup. Bodies that would block the event loop for more than a few milliseconds are read on a thread.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from starlette.types import Receive, Scope, Send

from plait_disagg.errors import BadInput, UnknownModel
from plait_disagg.messages.check import check_request
from plait_disagg.values import RankAnswer, RankRequest
from plait_serving.http.context import RouteContext
from plait_serving.http.edge.errors import ClientDisconnected
from plait_serving.http.edge.json_body import MAX_DEADLINE_MS
from plait_serving.ranking.codec import (
    BINARY_OUTPUT,
    HEADER_LENGTH,
    InferBody,
    TooLarge,
    encode_answer,
    hint,
    parse_infer,
)
from plait_serving.ranking.local import BoundModel

_INLINE_JSON_BYTES = 256 << 10
"""JSON of this size takes about 2 ms on the event loop; passing it to a thread and back takes some 0.1 ms, and adds
one more thread that competes for the GIL."""

_INLINE_BYTES = 8 << 20
"""Binary tensors are copied once, at some gigabytes per second."""


class Infer:
    """The application. Errors leave it as exceptions; the application around it knows their forms."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call. Raises `RankError`, `ClientDisconnected`, and what middlewares raise from `receive`."""
        path, tenant = scope["path_params"], scope["state"]["principal"].tenant
        bound = self._context.ranking_service.get(path["model"], path.get("version"))
        json_length, encoding = _headers(scope)
        raw = await _read(receive)
        read = partial(self._request, scope["state"], bound, json_length)
        if encoding:
            unpack = partial(inflate, raw, encoding, max_bytes=self._context.settings.max_body_bytes)
            raw = await self._context.workers.run(tenant, unpack)
            scope["state"]["hold_bytes"](len(raw))
        json_bytes = len(raw) if json_length is None else json_length
        is_quick = json_bytes <= _INLINE_JSON_BYTES and len(raw) <= _INLINE_BYTES
        body, request = read(raw) if is_quick else await self._context.workers.run(tenant, partial(read, raw))
        answer = await rank(self._context, bound, request, tenant=tenant)
        version = answer.version or bound.card.version  # the model may have been refreshed since the request came
        if version != path.get("version", version):
            message = f"model {bound.name!r} is being refreshed: the answer was of version {version!r}"
            raise UnknownModel(f"{message}, not {path['version']!r}", param="model")
        await _send(send, *_encode(bound, version, body, answer))

    def _request(
        self, state: dict[str, Any], bound: BoundModel, json_length: int | None, raw: bytes
    ) -> tuple[InferBody, RankRequest]:
        """Turn bytes into a checked request. Raises `BadInput`."""
        settings = self._context.settings
        body = parse_infer(raw, json_length, max_json_bytes=settings.max_infer_json_bytes)
        for name in body.outputs:
            if name not in bound.card.outputs:
                message = f"{name[:64]}: the model has no such output{hint(name, bound.card.outputs)}"
                raise BadInput(message, param=name[:64])
        request = check_request(
            bound.card,
            bound.binder.bind(body.arrays),
            request_id=unique_id(state),
            deadline_s=deadline(body.parameters, self._context.monotonic_s()),
        )
        return body, request


def _headers(scope: Scope) -> tuple[int | None, str]:
    """Return the length of the body's JSON, if it says so, and its encoding, if it has one. Raises `BadInput`."""
    length, encoding = None, ""
    for name, value in scope["headers"]:
        if name == b"inference-header-content-length":
            length = _number(value)
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            encoding = value.decode("latin-1")
    return length, encoding


def _encode(bound: BoundModel, version: str, body: InferBody, answer: RankAnswer) -> tuple[bytes, int | None]:
    head: dict[str, Any] = {"model_name": bound.name, "model_version": version}
    if body.id is not None:
        head["id"] = body.id
    echoed = {name: value for name, value in body.parameters.items() if name != BINARY_OUTPUT}
    if echoed:
        head["parameters"] = echoed
    asked = body.outputs or dict.fromkeys(bound.card.outputs, body.binary_output)
    arrays = {name: np.ascontiguousarray(answer.outputs[name].numpy()) for name in asked}
    return encode_answer(head, [(name, arrays[name], binary) for name, binary in asked.items()])


async def _read(receive: Receive) -> bytes:
    """Return the whole body. Raises `ClientDisconnected`."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _send(send: Send, payload: bytes, json_length: int | None) -> None:
    kind = b"application/json" if json_length is None else b"application/octet-stream"
    headers = [(b"content-length", b"%d" % len(payload)), (b"content-type", kind)]
    if json_length is not None:
        headers.append((HEADER_LENGTH.encode(), b"%d" % json_length))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": payload})


def _number(value: bytes) -> int:
    """Parse a length in a header. Raises `BadInput`."""
    text = value.strip()
    if not text.isdigit() or len(text) > 12:
        raise BadInput(f"{HEADER_LENGTH}: must be a number of bytes", param=HEADER_LENGTH)
    return int(text)


_ENCODINGS = ("gzip", "deflate")
# zlib's manual, inflateInit2: 32 more than the window's 15 bits reads the formats of gzip and zlib alike. HTTP's
# "deflate" is the zlib format (RFC 9110, 8.4.1.2).
_WINDOW_BITS = 15 + 32


def inflate(raw: bytes, encoding: str, *, max_bytes: int) -> bytes:
    """Decompress a body of that content-encoding to at most `max_bytes` + 1 bytes. Raises `BadInput`."""
    if encoding.strip().lower() not in _ENCODINGS:
        detail = f"content-encoding: only {' and '.join(_ENCODINGS)} are understood"
        raise BadInput(detail, param="content-encoding")
    unpacker = zlib.decompressobj(_WINDOW_BITS)
    try:
        body = unpacker.decompress(raw, max_bytes + 1)
    except zlib.error as error:
        raise BadInput(f"the body is not {encoding}: {error}", param="content-encoding") from error
    if len(body) > max_bytes:
        raise TooLarge(f"the body is larger than {max_bytes} bytes when it is unpacked")
    if not unpacker.eof or unpacker.unused_data:
        detail = "ends too early" if not unpacker.eof else "goes on after its end"
        raise BadInput(f"the compressed body {detail}", param="content-encoding")
    return body


def deadline(parameters: Mapping[str, Any], now_s: float) -> float | None:
    """Return the moment set by `deadline_ms` (ours) or `timeout` (Triton's, in microseconds; 0 is none).

    Raises `BadInput`.
    """
    wait_ms, name = parameters.get("deadline_ms"), "deadline_ms"
    if wait_ms is None:
        timeout_us, name = parameters.get("timeout", 0), "timeout"
        if timeout_us == 0:
            return None
        wait_ms = timeout_us / 1e3 if type(timeout_us) in (int, float) else timeout_us
    if type(wait_ms) not in (int, float) or not 0 < wait_ms <= MAX_DEADLINE_MS:
        message = f"parameters.{name}: must be a number above 0, at most {MAX_DEADLINE_MS} ms"
        raise BadInput(message, param=f"parameters.{name}")
    return now_s + float(wait_ms) / 1e3


async def rank(context: RouteContext, bound: BoundModel, request: RankRequest, *, tenant: str) -> RankAnswer:
    """Return the ranker's answer. Raises `RankError`."""
    start_s = context.monotonic_s()
    answer = await bound.ranker.rank(request)
    context.metrics.observe_rank(bound.name, request.candidates, context.monotonic_s() - start_s, answer, tenant)
    return answer


_numbers = itertools.count()


def unique_id(state: Mapping[str, Any]) -> str:
    """Return the request's id with a number appended: a client's id may repeat."""
    return f"{state['request_id']}.{next(_numbers)}"
