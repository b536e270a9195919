"""One HTTP/1.1 client connection: one request at a time, every end a `RequestOutcome`, never an exception.

Written for low CPU use: requests arrive as finished bytes and go out in one write; a response that arrives in one
piece costs one search, one look-up of its head and two calls. Times are absolute, from `time.perf_counter_ns` (on
Linux CLOCK_MONOTONIC, which all processes of a machine share).
"""

from __future__ import annotations

import asyncio
import struct
import termios
from fcntl import ioctl
from time import perf_counter_ns
from typing import Protocol, cast

from plait_loadtest.values import RequestOutcome
from plait_loadtest.wire.framing import HEAD_LIMIT_BYTES, HTTP2, Framing, Head, framing_of, parse_head

IDLE = -1
_OUTCOMES = {2: RequestOutcome.OK, 4: RequestOutcome.HTTP_4XX, 5: RequestOutcome.HTTP_5XX}
_BLANK_LINE = b"\r\n\r\n"
_EVENT = b"\ndata:"
_LARGE_BYTES = 64 << 10
_WHY_BYTES = 8192  # of an answer that is no success: what tells why
_NO_HEAD = Head(status=0, length=-1, chunked=False, keep_alive=False, is_event_stream=False, server_ms=float("nan"))


class Owner(Protocol):
    """Receives the events of a connection."""

    def ended(self, connection: HttpConnection, slot: int, outcome: RequestOutcome, now_ns: int) -> None:
        """Handle the end of request `slot`. Facts stay on the connection until its next `HttpConnection.send`."""

    def lost(self, connection: HttpConnection) -> None:
        """Handle a connection that closed while it was idle."""


class HttpConnection(asyncio.Protocol):
    """A connection. Facts of the last request: `sent_ns`, `first_byte_ns`, `first_part_ns` (-1: never), `head`, `body`
    (of event streams, or if `keeps_body`; the first bytes of what is no success), `received_bytes` (of the whole
    response), `is_reusable` once it ended, `why` it was reset, truncated or garbled. `slot` is the request in flight,
    or `IDLE`; `is_kept` is the owner's: the connection was open before its request. `is_unread`: it ended before the
    request reached the server."""

    def __init__(self, owner: Owner, *, keeps_body: bool, limit_bytes: int) -> None:
        self._owner = owner
        self._keeps_body = keeps_body
        self._keeps_bytes = 0
        self._limit_bytes = limit_bytes
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._framing: Framing | None = None
        self._pieces: list[bytes] = []
        self._payload_bytes = 0
        self._events_tail = b""
        self.slot = IDLE
        self.request = b""
        self.head = _NO_HEAD
        self.sent_ns = self.first_byte_ns = self.first_part_ns = -1
        self.received_bytes = 0
        self.is_reusable = True
        self.is_kept = False
        self.why = ""
        self.is_unread = False

    @property
    def body(self) -> bytes:
        """The payload received, as far as it is kept."""
        return b"".join(self._pieces)

    @property
    def is_open(self) -> bool:
        """Whether neither side has ended it."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (asyncio.Protocol)."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by name

    def send(self, slot: int, request: bytes) -> None:
        """Send a request; the owner is notified of its end, never before this returns."""
        assert self._transport is not None
        self.slot = slot
        self.request = request
        self.head = _NO_HEAD
        self.first_byte_ns = self.first_part_ns = -1
        self.received_bytes = 0
        if self._framing is not None:
            self._framing = None
            self._pieces = []
            self._payload_bytes = 0
            self._events_tail = b""
        self.sent_ns = perf_counter_ns()
        self._transport.write(request)

    def give_up(self, outcome: RequestOutcome, now_ns: int) -> None:
        """End the request on purpose; the connection cannot be reused."""
        self._end(outcome, now_ns, is_reusable=False)

    def close(self) -> None:
        """Drop the connection at once. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Process a piece of the response (asyncio.Protocol); data without a request closes the connection."""
        now_ns = perf_counter_ns()
        if self.slot == IDLE:
            self.close()  # nobody asked
            self._owner.lost(self)
            return
        if self.first_byte_ns < 0:
            self.first_byte_ns = now_ns
        self.received_bytes += len(data)
        try:
            if self._framing is not None:
                self._take(data, now_ns)
            else:
                self._take_head(data, now_ns)
        except ValueError as error:
            self.why = str(error)
            if self._framing is None:
                self._pieces = [data]
            self._end(RequestOutcome.GARBLED, now_ns, is_reusable=False)

    def eof_received(self) -> None:
        """Note whether the server had ended the connection before it had the request (asyncio.Protocol).

        An end confirms what came before it (RFC 9293). A request of which nothing is confirmed by then came later, and
        a server that has ended the connection reads no more (RFC 9112 section 9.6).
        """
        if self._transport is None:
            return
        if self.slot == IDLE:  # at once: `connection_lost` comes later, and a request could come between
            self.close()
            self._owner.lost(self)
        elif self.first_byte_ns < 0:
            queued = ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            unconfirmed = struct.unpack("i", queued)[0] + self._transport.get_write_buffer_size()
            self.is_unread = unconfirmed >= len(self.request)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request in flight, or report the idle connection lost; also called at the server's end of file."""
        if self._transport is None:
            return  # we closed it
        self._transport = None
        if self.slot == IDLE:
            self._owner.lost(self)
            return
        now_ns = perf_counter_ns()
        if self._framing is not None and self._framing.end():
            self._complete(now_ns, is_reusable=False)
        elif self.first_byte_ns < 0:
            self.why = "the connection ended before an answer" + (f": {exc}" if exc else "")
            self._end(RequestOutcome.RESET, now_ns, is_reusable=False)
        else:
            self.why = "the connection ended within the answer" + (f": {exc}" if exc else "")
            is_http = self._framing is not None or b"HTTP/1."[: len(self._buffer)] == self._buffer[:7]
            self._end(RequestOutcome.TRUNCATED if is_http else RequestOutcome.GARBLED, now_ns, is_reusable=False)

    def _take_head(self, data: bytes, now_ns: int) -> None:
        if self._buffer:
            data = self._buffer + data
        end = data.find(_BLANK_LINE)
        if end < 0:
            if data[:2] == b"\0\0" and data[3:4] in (b"\4", b"\7"):  # the frames SETTINGS and GOAWAY
                raise ValueError(HTTP2)
            if len(data) > HEAD_LIMIT_BYTES or b"HTTP/1."[: len(data)] != data[:7]:
                raise ValueError("not a head")
            self._buffer = data
            return
        self._buffer = b""
        head = parse_head(data[:end])
        if 100 <= head.status < 200 and head.status != 101:
            if len(data) > end + 4:
                self._take_head(data[end + 4 :], now_ns)
            return
        self.head = head
        is_whole = head.length == len(data) - end - 4 and not head.chunked
        if is_whole and not head.is_event_stream and head.length <= self._limit_bytes:
            if self._keeps_body or not head.is_plain:
                self._pieces = [data[end + 4 :]]
            self._complete(now_ns, is_reusable=head.keep_alive)
            return
        self._pieces = []
        self._keeps_bytes = 0 if head.is_plain else _WHY_BYTES
        if self._keeps_body or head.is_event_stream:
            self._keeps_bytes = self._limit_bytes
        self._framing = framing_of(head, to_head_request=self.request.startswith(b"HEAD "))
        self._take(data[end + 4 :], now_ns)

    def _take(self, data: bytes, now_ns: int) -> None:
        assert self._framing is not None
        payload, is_complete, extra = self._framing.feed(data)
        if self._payload_bytes < self._keeps_bytes:
            self._pieces.append(payload)
        self._payload_bytes += len(payload)
        if self._payload_bytes > self._limit_bytes:
            raise ValueError(f"larger than limits.response_bytes ({self._limit_bytes})")
        if self.head.is_event_stream and self.first_part_ns < 0:
            self._look_for_event(payload, now_ns)
        if is_complete:
            self._complete(now_ns, is_reusable=self.head.keep_alive and self.head.status != 101 and not extra)

    def _look_for_event(self, payload: bytes, now_ns: int) -> None:
        """Detect the first `data:` line, which may arrive in two pieces; comments and event names do not count."""
        text = (self._events_tail or b"\n") + payload.replace(b"\r", b"\n")
        if _EVENT in text:
            self.first_part_ns = now_ns
        self._events_tail = text[1 - len(_EVENT) :]

    def _complete(self, now_ns: int, *, is_reusable: bool) -> None:
        outcome = _OUTCOMES.get(self.head.status // 100, RequestOutcome.HTTP_OTHER)
        if len(self.request) > _LARGE_BYTES and self._transport is not None:
            # The server may have answered before it took all: what is left would precede the next request.
            is_reusable = is_reusable and self._transport.get_write_buffer_size() == 0
        self._end(outcome, now_ns, is_reusable=is_reusable)

    def _end(self, outcome: RequestOutcome, now_ns: int, *, is_reusable: bool) -> None:
        self.is_reusable = is_reusable
        slot, self.slot = self.slot, IDLE
        self._owner.ended(self, slot, outcome, now_ns)
