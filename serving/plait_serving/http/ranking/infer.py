"""`POST /v2/models/{model}[/versions/{version}]/infer`, as a bare ASGI application.

The hot path of ranking: no body model, no dependency injection, no response object; each of them costs more than a
small model's lookup. Bodies that would block the event loop for more than a few milliseconds are read on a thread.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from starlette.types import Receive, Scope, Send

from plait_disagg.errors import BadInput, UnknownModel
from plait_disagg.messages.check import check_request
from plait_disagg.values import RankAnswer, RankRequest
from plait_serving.http.context import RouteContext
from plait_serving.http.edge.errors import ClientDisconnected
from plait_serving.http.ranking.submit import deadline, rank, unique_id
from plait_serving.ranking.codec import (
    BINARY_OUTPUT,
    HEADER_LENGTH,
    InferBody,
    TooLarge,
    encode_answer,
    hint,
    parse_infer,
)
from plait_serving.ranking.service import BoundModel

_INLINE_JSON_BYTES = 256 << 10
"""JSON of this size takes about 2 ms on the event loop; passing it to a thread and back takes some 0.1 ms, and adds
one more thread that competes for the GIL."""

_INLINE_BYTES = 8 << 20
"""Binary tensors are copied once, at some gigabytes per second."""


@dataclass(frozen=True, slots=True)
class _Headers:
    """The two headers that determine how to read the body."""

    json_length: int | None
    encoding: str

    @classmethod
    def of(cls, scope: Scope) -> Self:
        """Read them from the scope. Raises `BadInput`."""
        length, encoding = None, ""
        for name, value in scope["headers"]:
            if name == b"inference-header-content-length":
                length = _number(value)
            elif name == b"content-encoding" and value.strip().lower() != b"identity":
                encoding = value.decode("latin-1")
        return cls(length, encoding)

    def is_quick(self, body_bytes: int) -> bool:
        """Return whether a body of this size may be read on the event loop."""
        json_bytes = body_bytes if self.json_length is None else self.json_length
        return json_bytes <= _INLINE_JSON_BYTES and body_bytes <= _INLINE_BYTES


class Infer:
    """The application. Errors leave it as exceptions; the application around it knows their forms."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call. Raises `RankError`, `ClientDisconnected`, and what middlewares raise from `receive`."""
        path, tenant = scope["path_params"], scope["state"]["principal"].tenant
        bound = self._context.ranking_service.get(path["model"], path.get("version"))
        headers = _Headers.of(scope)
        raw = await _read(receive)
        read = partial(self._request, scope["state"], bound, headers)
        if headers.encoding:
            unpack = partial(inflate, raw, headers.encoding, max_bytes=self._context.settings.max_body_bytes)
            raw = await self._context.workers.run(tenant, unpack)
            scope["state"]["hold_bytes"](len(raw))
        is_quick = headers.is_quick(len(raw))
        body, request = read(raw) if is_quick else await self._context.workers.run(tenant, partial(read, raw))
        answer = await rank(self._context, bound, request, tenant=tenant)
        _check_version(bound, path.get("version"), answer)
        payload, json_length = _encode(bound, body, answer)
        await _send(send, payload, json_length)

    def _request(
        self, state: dict[str, Any], bound: BoundModel, headers: _Headers, raw: bytes
    ) -> tuple[InferBody, RankRequest]:
        """Turn bytes into a checked request. Raises `BadInput`."""
        settings = self._context.settings
        body = parse_infer(raw, headers.json_length, max_json_bytes=settings.max_infer_json_bytes)
        for name in body.outputs:
            if name not in bound.card.outputs:
                message = f"{name[:64]}: the model has no such output{hint(name, bound.card.outputs)}"
                raise BadInput(message, param=name[:64])
        tensors, _ = bound.binder.bind(body.arrays)
        request = check_request(
            bound.card,
            tensors,
            request_id=unique_id(state, next(self._numbers)),
            deadline_s=deadline(body.parameters, self._context.monotonic_s()),
        )
        return body, request


def _encode(bound: BoundModel, body: InferBody, answer: RankAnswer) -> tuple[bytes, int | None]:
    head: dict[str, Any] = {"model_name": bound.name, "model_version": _version(bound, answer)}
    if body.id is not None:
        head["id"] = body.id
    echoed = {name: value for name, value in body.parameters.items() if name != BINARY_OUTPUT}
    if echoed:
        head["parameters"] = echoed
    asked = body.outputs or dict.fromkeys(bound.card.outputs, body.binary_output)
    outputs = [(name, _array(answer, name), binary) for name, binary in asked.items()]
    return encode_answer(head, outputs)


def _version(bound: BoundModel, answer: RankAnswer) -> str:
    """Return the version that made the answer: the model may have been refreshed since the request came."""
    return answer.version or bound.card.version


def _check_version(bound: BoundModel, asked: str | None, answer: RankAnswer) -> None:
    if asked is not None and _version(bound, answer) != asked:
        message = (
            f"model {bound.name!r} is being refreshed: the answer was of version {answer.version!r}, not {asked!r}"
        )
        raise UnknownModel(message, param="model")


def _array(answer: RankAnswer, name: str) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(answer.outputs[name].numpy())


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
    headers = [(b"content-length", b"%d" % len(payload))]
    if json_length is None:
        headers.append((b"content-type", b"application/json"))
    else:
        headers.append((b"content-type", b"application/octet-stream"))
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
