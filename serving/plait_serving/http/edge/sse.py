"""OpenAI's server-sent events for images.

`event: image_generation.partial_image` (index from 0), then one `event: image_generation.completed`, for edits
`image_edit.partial_image` and `image_edit.completed`; an error after
the stream began is `data: {"error": {...}}` without an event name, which the `openai` client raises as APIError.
Progress is a comment line (`: step 3/20`), which every SSE reader skips: it keeps proxies from closing the
connection, and a page that reads the stream itself can show it. `stream` with `n` > 1 is refused, in OpenAI's own
words, because its events do not identify the image that they belong to.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait_serving.http.edge.errors import ClientDisconnected
from plait_serving.http.edge.feed import until_disconnect

PING = b": ping\n\n"


def event(name: str, data: Mapping[str, object]) -> bytes:
    """Return one event; the data also names its type, like OpenAI's."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode("ascii")


def error_event(body: bytes) -> bytes:
    """Return an error body as the last event of a stream."""
    return b"data: " + body + b"\n\n"


def progress_comment(step: int, steps: int) -> bytes:
    """Return a comment with the image's progress."""
    return f": step {step}/{steps}\n\n".encode("ascii")


class EventStream(Response):
    """Sends chunks as they come and closes their generator as soon as the client disconnects, even between chunks."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        # x-accel-buffering: nginx would otherwise hold events back.
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Handle an ASGI call."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientDisconnected:
            pass
        finally:
            await self._chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        chunk = await anext(self._chunks, None)  # before the client can leave: only what has begun cleans up
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while chunk is not None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await anext(self._chunks, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
