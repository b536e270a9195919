"""HTTP/1.1 for senders that finish what they begin.

uvicorn waits for the rest of a request for as long as its sender keeps the connection open, so a hundred half-sent
heads hold a hundred sockets for ever. Its own limits do not help: `timeout_keep_alive` counts only between requests,
and `limit_concurrency` also refuses those who did nothing wrong.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from plait_serving.http.edge.errors import ApiError
from plait_serving.http.edge.request_id import accepted_id, set_id

_MIN_BODY_BYTES = 20 << 10
"""What must have arrived of a body for each period of its time so far: 2 KiB/s on average, less than any network that
images are sent over. After the first period who was quick may pause."""

_MAX_BODY_PERIODS = 60
"""A body at just the least rate would take hours: the largest one arrives within 10 minutes at 1 Mbit/s."""

_TOO_SLOW = ApiError(408, "the body came too slowly, or took too long", code="body_too_slow")

_Part = Literal["head", "body"]


class PromptHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes a connection whose request does not arrive: a head in time and within bounds, a
    body at more than a trickle, and not for ever. It is what first reads a request, and settles its id."""

    head_s = 10.0
    """From the connection, or the first byte of a further request, to the end of its head. nginx waits for 60 s and
    HAProxy recommends 5 s; a head is one packet."""
    max_head_bytes = 64 << 10
    body_s = 10.0
    """A period of a body's time."""

    _awaited: _Part | None = "head"
    _received_bytes = 0
    _periods = 0
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start waiting for the first head."""
        super().connection_made(transport)
        self._patience = self.loop.call_later(self.head_s, self._run_out)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a piece of a request. Most requests come in one piece, and cost no timer."""
        if self._awaited is None:
            self._awaited, self._received_bytes = "head", 0
        self._received_bytes += len(data) if self._awaited == "head" else 0
        super().data_received(data)
        if self._awaited is None:
            self._stop_waiting()
        elif self._awaited == "head" and self._received_bytes > self.max_head_bytes:
            self.transport.close()
        elif self._patience is None and not self.transport.is_closing():
            self._wait()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._stop_waiting()
        self._awaited, self._received_bytes, self._periods = "body", 0, 0
        set_id(self.headers)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body is there."""
        self._received_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        self._awaited = None
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to the protocol that takes it over."""
        super().handle_websocket_upgrade()
        self._awaited = None

    def _wait(self) -> None:
        self._patience = self.loop.call_later(self.head_s if self._awaited == "head" else self.body_s, self._run_out)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _run_out(self) -> None:
        """Close the connection, unless its sender is not at fault: an earlier answer is still due on it, the body makes
        progress, or nobody here reads it; that time does not count."""
        self._patience = None
        if self._awaited is None or self.transport.is_closing():
            return
        if self._awaited == "head":
            is_at_fault = self.cycle is None or self.cycle.response_complete
        else:
            self._periods += not (self.flow.read_paused or self.cycle.waiting_for_100_continue)
            least_bytes = self._periods * _MIN_BODY_BYTES
            is_at_fault = self._received_bytes < least_bytes or self._periods >= _MAX_BODY_PERIODS
        if is_at_fault and self._awaited == "body":
            self._refuse(_TOO_SLOW)
        elif is_at_fault:
            self.transport.close()
        else:
            self._wait()

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer has begun, and close; for the application its client has gone."""
        if not self.cycle.response_started:
            answer = error.response(self.cycle.scope["path"])
            answer.headers["x-request-id"] = accepted_id(dict(self.cycle.scope))
            head = [b"%s: %s\r\n" % pair for pair in (*answer.raw_headers, (b"connection", b"close"))]
            self.transport.write(b"".join([STATUS_LINE[answer.status_code], *head, b"\r\n", bytes(answer.body)]))
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self.transport.close()
