"""How bodies come through Serve's proxy: in large pieces, and no faster than the ingress takes them.

The proxy reads a body as it comes, keeps all that nobody has fetched yet, and hands that over at once. Each handing
over is a call between two processes, a millisecond or more of both: six hundred bodies that come a byte a second take
both their loops, and twelve of 59 MB some 700 MB and stops of seconds.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait_serving.deployments.ray_internals import proxy_queue
from plait_serving.http.edge.limits import declared_bytes

_PIECE_BYTES = 64 << 10
"""What uvicorn holds of a body before it stops reading, so that a piece costs no more memory than it does already."""

_MAX_AHEAD_BYTES = 1 << 20
"""What waits to be fetched at most: some milliseconds of a loop to pickle or to copy."""

_LARGE_BYTES_PER_S = 32 << 20
"""How fast large bodies go on, all together: a megabyte costs proxy and ingress some 7 ms, so that this is a quarter of
a core. Eight of 17 MB at once would have a whole one for a second."""


class GatheringMiddleware:
    """Passes a request on when the first piece of its body is whole: all of it, or 64 KiB. One that declares more goes
    on at once, since it may be refused for that. Who leaves before has asked nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        first = None if declared_bytes(scope) > _PIECE_BYTES else await _piece(receive)
        if first is not None and first["type"] == "http.disconnect":
            return

        async def receive_pieces() -> Message:
            nonlocal first
            if first is None:
                return await _piece(receive)
            message, first = first, None
            return message

        await self._app(scope, receive_pieces, send)


async def _piece(receive: Receive) -> Message:
    """Return the next message of a body of at least 64 KiB, or the last one, or the client's leaving."""
    pieces: list[bytes] = []
    received = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return message
        pieces.append(message.get("body", b""))
        received += len(pieces[-1])
        more = message.get("more_body", False)
        if not more or received >= _PIECE_BYTES:
            return {"type": "http.request", "body": b"".join(pieces), "more_body": more}


class PacedQueue(proxy_queue()):  # type: ignore[misc]  # Ray is untyped
    """The proxy's queue of what the ingress fetches, which makes the sender wait while it is full; those of several
    queues go on one after the other."""

    next_at_s = 0.0
    """When the sender that waits last goes on, by the event loop's clock: of all queues."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead_bytes = 0
        self._fetched = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        """Put a message, and wait until there is room for another one."""
        await super().__call__(message)
        self._ahead_bytes += len(message.get("body", b""))
        if self._ahead_bytes < _MAX_AHEAD_BYTES:
            return
        now_s = asyncio.get_running_loop().time()
        passed_s = self._ahead_bytes / _LARGE_BYTES_PER_S
        PacedQueue.next_at_s = max(now_s, PacedQueue.next_at_s) + passed_s
        await asyncio.sleep(PacedQueue.next_at_s - now_s)
        while self._ahead_bytes >= _MAX_AHEAD_BYTES:
            self._fetched.clear()
            await self._fetched.wait()

    def get_messages_nowait(self) -> list[Message]:
        """Return all messages that are there."""
        self._ahead_bytes = 0
        self._fetched.set()
        messages: list[Message] = super().get_messages_nowait()
        return messages
