"""How an HTTP/1.1 response is delimited and what its head declares (RFC 9112). Pure: bytes in, facts out.

Every deviation is a ValueError; the connection counts it as garbled.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import NamedTuple, TypeAlias

HEAD_LIMIT_BYTES = 64 << 10
"""A head larger than this counts as garbled; servers commonly refuse to send or accept more than 8 to 64 KiB."""

HTTP2 = "the server speaks HTTP/2, and plait loadtest HTTP/1.1 only"

_CHUNK_LINE_LIMIT_BYTES = 4096
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_DURATION = re.compile(r"(?:^|,)\s*([^\s;,]+)[^,]*?;\s*dur=([0-9]+(?:\.[0-9]+)?)")


class Head(NamedTuple):
    """The relevant parts of a response's head. `length` -1: not announced. `server_ms` nan: not in the head.
    `is_plain`: a success that is no stream."""

    status: int
    length: int
    chunked: bool
    keep_alive: bool
    is_event_stream: bool
    server_ms: float
    is_plain: bool = True
    location: str = ""


# A server's heads repeat but for the date, which changes once a second: most are looked up instead of parsed.
@lru_cache(maxsize=64)
def parse_head(raw: bytes) -> Head:
    """Parse the head between the first byte and the blank line, both line ends excluded. Raises ValueError."""
    first, *lines = raw.split(b"\r\n")
    status_line = _STATUS_LINE.fullmatch(first)
    if status_line is None:
        raise ValueError("not a status line")
    fields = _fields(lines)
    coding = fields.get(b"transfer-encoding", b"").lower()
    connection = fields.get(b"connection", b"").lower()
    keep_alive = b"close" not in connection and (status_line[1] == b"1" or b"keep-alive" in connection)
    is_event_stream = fields.get(b"content-type", b"").lower().startswith(b"text/event-stream")
    return Head(
        status=int(status_line[2]),
        length=_length(fields.get(b"content-length")),
        chunked=coding.endswith(b"chunked"),
        keep_alive=keep_alive,
        is_event_stream=is_event_stream,
        server_ms=server_timing_ms(fields.get(b"server-timing", b"").decode("latin-1")),
        is_plain=status_line[2].startswith(b"2") and not is_event_stream,
        location=fields.get(b"location", b"").decode("latin-1"),
    )


def server_timing_ms(value: str) -> float:
    """Return the milliseconds of a `server-timing` header: its `total`, or the sum of its parts; nan if it has none."""
    parts = {name.lower(): float(duration) for name, duration in _DURATION.findall(value)}
    return parts.get("total", sum(parts.values()) if parts else math.nan)


def _fields(lines: list[bytes]) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name[0] in b" \t":
            raise ValueError("not a header line")
        name, value = name.lower(), value.strip()
        if name == b"content-length" and fields.get(name, value) != value:
            raise ValueError("two lengths")
        fields[name] = fields[name] + b", " + value if name in fields and name != b"content-length" else value
    return fields


def _length(value: bytes | None) -> int:
    if value is None:
        return -1
    if not value.isdigit() or len(value) > 18:
        raise ValueError("not a length")
    return int(value)


class FeedResult(NamedTuple):
    """The result of a piece of input: payload, whether the body is complete, and bytes that came after its end."""

    payload: bytes
    complete: bool
    extra: bytes


class Length:
    """A body of a given length in bytes."""

    def __init__(self, length: int) -> None:
        self._left = length

    def feed(self, data: bytes) -> FeedResult:
        """Take up to the remaining bytes as payload; the rest came after the end."""
        payload, extra = data[: self._left], data[self._left :]
        self._left -= len(payload)
        return FeedResult(payload, self._left == 0, extra)

    def end(self) -> bool:
        """Return whether all bytes have arrived."""
        return self._left == 0


class UntilClose:
    """A body that ends with the connection."""

    def feed(self, data: bytes) -> FeedResult:
        """Take everything as payload; the body is never complete before the connection ends."""
        return FeedResult(data, False, b"")

    def end(self) -> bool:
        """Return True: the end of the connection completes the body."""
        return True


class Chunked:
    """A body in chunks, each preceded by a line with its length in hex; a chunk of length 0 and trailers end it."""

    def __init__(self) -> None:
        self._line = b""  # the part that came of a chunk's line
        self._left = 0  # of the current chunk
        self._line_end = b""  # what must still come after it
        self._in_trailers = False

    def feed(self, data: bytes) -> FeedResult:
        """Return the payload of the chunks, complete after the trailers. Raises ValueError for malformed chunks."""
        payload: list[bytes] = []
        while data:
            if self._left:
                payload.append(data[: self._left])
                data = data[self._left :]
                self._left -= len(payload[-1])
                self._line_end = b"" if self._left else b"\r\n"
            elif self._line_end:
                data = self._take_line_end(data)
            else:
                line, data = self._next_line(data)
                if line is not None and not self._in_trailers:
                    self._open(line)
                elif line == b"":
                    return FeedResult(b"".join(payload), True, data)
        return FeedResult(b"".join(payload), False, b"")

    def end(self) -> bool:
        """Return False: a complete body has already ended with its last chunk."""
        return False

    def _take_line_end(self, data: bytes) -> bytes:
        length = min(len(data), len(self._line_end))
        if data[:length] != self._line_end[:length]:
            raise ValueError("a chunk does not end where it said")
        self._line_end = self._line_end[length:]
        return data[length:]

    def _next_line(self, data: bytes) -> tuple[bytes | None, bytes]:
        joined = self._line + data
        line, ended, rest = joined.partition(b"\r\n")
        if len(line) > _CHUNK_LINE_LIMIT_BYTES:
            raise ValueError("a chunk's line is too long")
        self._line = b"" if ended else joined
        return (line, rest) if ended else (None, b"")

    def _open(self, line: bytes) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise ValueError("not a chunk's length")
        length = int(match[1], 16)
        self._left = length
        self._in_trailers = length == 0


Framing: TypeAlias = Length | UntilClose | Chunked
"""Finds the end of one body: `feed` processes the next bytes, and raises ValueError if they cannot be part of a body;
`end` returns whether the body is complete if the connection ends here."""


def framing_of(head: Head, *, to_head_request: bool) -> Framing:
    """Return how the body after `head` ends (RFC 9112 section 6.3)."""
    if to_head_request or head.status in (101, 204, 304):
        return Length(0)
    if head.chunked:
        return Chunked()
    return Length(head.length) if head.length >= 0 else UntilClose()
