"""The bytes on the wire, and a stream of them as it arrives. Sans-I/O; nothing is allocated before it was checked.

A frame is `prefix | header | table | payload`, all integers big-endian.

- prefix (24 bytes): magic `PLT1`, kind u8, flags u8 (0), buffer count u16, header bytes u32,
  zero u32, payload bytes u64.
- header: a JSON object in UTF-8, strict (no NaN), at most `MessageLimits.header_bytes`. One that begins with
  a space holds what orjson cannot express or keep (integers beyond 64 bits, lone surrogates).
- table: MESSAGE: one u64 length per buffer. SHARED: the message id, then (offset, length) per buffer.
- payload: the buffers end to end (MESSAGE), or nothing (SHARED: it is in the sender's segment).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import orjson

from plait_fabric.errors import BadHeader, FrameTooLarge, ProtocolViolation
from plait_fabric.memory.pool import Lease, align
from plait_fabric.values import MessageLimits

_MAGIC = b"PLT1"
_PREFIX = struct.Struct("!4sBBHIIQ")
PREFIX_BYTES = _PREFIX.size
_U64 = struct.Struct("!Q")


class FrameKind(IntEnum):
    """The kind of a frame."""

    MESSAGE = 1
    SHARED = 2
    GOODBYE = 3


_KINDS = {int(kind): kind for kind in FrameKind}


class Prefix(NamedTuple):
    """The fixed-size start of a frame."""

    kind: FrameKind
    buffers: int
    header_bytes: int
    payload_bytes: int

    @property
    def table_bytes(self) -> int:
        """Length of the table that follows the header."""
        if self.kind is FrameKind.SHARED:
            return _U64.size * (1 + 2 * self.buffers)
        return _U64.size * self.buffers


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_FAST = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def encode_header(header: Mapping[str, Any]) -> bytes:
    """Serialise a header. Raises `BadHeader` when it is not a JSON object with string keys."""
    if type(header) is dict:
        try:
            encoded = orjson.dumps(header, option=_FAST)
        except TypeError:
            return _encode_slowly(header)
        if b"null" not in encoded:  # which may stand for a NaN
            return encoded
    return _encode_slowly(header)


def _encode_slowly(header: Mapping[str, Any]) -> bytes:
    if not isinstance(header, Mapping):
        raise BadHeader(f"the header must be a mapping, got {type(header).__name__}")
    for key in header:
        if not isinstance(key, str):
            raise BadHeader(f"header keys must be strings, got {key!r}")
    try:
        return b" " + _ENCODER.encode(dict(header)).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise BadHeader(f"the header is not JSON: {error}") from error


def decode_header(data: bytes) -> dict[str, Any]:
    """Parse a received header. Raises `ProtocolViolation`."""
    try:
        header = orjson.loads(data) if data[:1] == b"{" else _DECODER.decode(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"the peer's header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolViolation(f"the peer's header is a JSON {type(header).__name__}, not an object")
    return header


def pack_head(kind: FrameKind, header: bytes, table: bytes, *, buffers: int, payload_bytes: int) -> bytes:
    """Return a frame without its payload."""
    return _PREFIX.pack(_MAGIC, kind, 0, buffers, len(header), 0, payload_bytes) + header + table


def pack_message_head(header: bytes, lengths: Sequence[int]) -> bytes:
    """Return a MESSAGE of buffers of these lengths without its payload."""
    table = pack_lengths(lengths)
    return pack_head(FrameKind.MESSAGE, header, table, buffers=len(lengths), payload_bytes=sum(lengths))


def pack_one(header: bytes, nbytes: int) -> bytes:
    """Return a MESSAGE of one buffer without its payload; like `pack_head` and `pack_lengths`, but faster."""
    return _PREFIX.pack(_MAGIC, 1, 0, 1, len(header), 0, nbytes) + header + _U64.pack(nbytes)


def unpack_one(packet: bytes, limits: MessageLimits) -> tuple[dict[str, Any], bytearray] | None:
    """Return header and payload of a packet in the format of `pack_one`, or None for any other, valid or not.

    Raises `ProtocolViolation`.
    """
    if len(packet) < PREFIX_BYTES:
        return None
    magic, kind, flags, buffers, header_bytes, zero, payload_bytes = _PREFIX.unpack_from(packet)
    table_at = PREFIX_BYTES + header_bytes
    if magic != _MAGIC or kind != 1 or flags or zero or buffers != 1 or header_bytes > limits.header_bytes:
        return None
    if payload_bytes > limits.message_bytes or len(packet) != table_at + _U64.size + payload_bytes:
        return None
    if _U64.unpack_from(packet, table_at)[0] != payload_bytes:
        return None
    return decode_header(packet[PREFIX_BYTES:table_at]), bytearray(memoryview(packet)[table_at + _U64.size :])


def unpack_prefix(data: bytes | bytearray | memoryview, limits: MessageLimits) -> Prefix:
    """Parse and check a prefix. Raises `ProtocolViolation`, `FrameTooLarge` (both end the channel)."""
    magic, kind_code, flags, buffers, header_bytes, zero, payload_bytes = _PREFIX.unpack_from(data)
    if magic != _MAGIC or flags or zero:
        raise ProtocolViolation("the peer sent something that is not a fabric frame")
    kind = _KINDS.get(kind_code)
    if kind is None:
        raise ProtocolViolation(f"the peer sent a frame of unknown kind {kind_code}")
    try:
        limits.check(header_bytes, buffers, payload_bytes)
    except FrameTooLarge as error:
        raise FrameTooLarge(f"the peer announced too much: {error}", channel_usable=False) from None
    if kind is FrameKind.GOODBYE and (buffers or header_bytes or payload_bytes):
        raise ProtocolViolation("the peer's goodbye carries a payload")
    return Prefix(kind, buffers, header_bytes, payload_bytes)


def pack_lengths(lengths: Sequence[int]) -> bytes:
    """Return the table of a MESSAGE."""
    return struct.pack(f"!{len(lengths)}Q", *lengths)


def unpack_lengths(data: bytes | bytearray | memoryview, prefix: Prefix) -> tuple[int, ...]:
    """Parse the table of a MESSAGE. Raises `ProtocolViolation` unless it adds up to the payload."""
    lengths: tuple[int, ...] = struct.unpack(f"!{prefix.buffers}Q", data)
    if sum(lengths) != prefix.payload_bytes:
        raise ProtocolViolation("the peer's buffer lengths do not add up to its payload")
    return lengths


def pack_places(message_id: int, places: Sequence[tuple[int, int]]) -> bytes:
    """Return the table of a SHARED frame: the id to acknowledge, then the location of each buffer."""
    flat = [number for place in places for number in place]
    return struct.pack(f"!{1 + len(flat)}Q", message_id, *flat)


def unpack_places(
    data: bytes | bytearray | memoryview, prefix: Prefix, segment_bytes: int
) -> tuple[int, list[tuple[int, int]]]:
    """Parse the table of a SHARED frame. Raises `ProtocolViolation` if a buffer is outside the segment."""
    message_id, *flat = struct.unpack(f"!{1 + 2 * prefix.buffers}Q", data)
    places = list(zip(flat[::2], flat[1::2], strict=True))
    for offset, nbytes in places:
        if offset + nbytes > segment_bytes:
            raise ProtocolViolation("the peer's buffer lies outside of its segment")
    if sum(nbytes for _, nbytes in places) != prefix.payload_bytes:
        raise ProtocolViolation("the peer's buffer lengths do not add up to its payload")
    return message_id, places


class StreamFrame(NamedTuple):
    """A frame that has arrived. SHARED: its payload has not, and `table` says where it will be."""

    prefix: Prefix
    header: bytes
    table: bytes
    views: list[memoryview]
    lease: Lease | None


class FrameReader:
    """Splits a byte stream into frames. Resumable: fill `wanted`, then call `step`."""

    def __init__(self, limits: MessageLimits, *, announces: bool = False) -> None:
        """Start with nothing read. `announces`: whether SHARED frames may come."""
        self._limits = limits
        self._announces = announces
        self._begin()

    def _begin(self) -> None:
        self._prefix: Prefix | None = None
        self._laid_out = False
        self.lease: Lease | None = None
        """Of a partially received message."""
        self._views: list[memoryview] = []
        self._unfilled: list[memoryview] = []
        self._bytes = bytearray(PREFIX_BYTES)
        self.wanted = memoryview(self._bytes)

    @property
    def begun(self) -> bool:
        """Whether part of a frame has arrived."""
        return self._prefix is not None or len(self.wanted) < PREFIX_BYTES

    def filled(self, nbytes: int) -> None:
        """Record that the first `nbytes` of `wanted` have arrived."""
        self.wanted = self.wanted[nbytes:]

    def step(self, acquire: Callable[[int], Lease]) -> StreamFrame | None:
        """Advance when `wanted` is empty: set the next `wanted`, or return a complete frame.

        Raises what `acquire` raises (call again later, nothing is lost), `ProtocolViolation`, `FrameTooLarge`.
        """
        if self._prefix is None:
            self._prefix = unpack_prefix(self._bytes, self._limits)
            if self._prefix.kind is FrameKind.SHARED and not self._announces:
                raise ProtocolViolation("the peer announced shared memory on a stream")
            self._bytes = bytearray(self._prefix.header_bytes + self._prefix.table_bytes)
            self.wanted = memoryview(self._bytes)
            if self.wanted:
                return None
        if not self._laid_out and self._prefix.kind is not FrameKind.SHARED:
            self._lay_out(self._prefix, acquire)
        if self._unfilled:
            self.wanted = self._unfilled.pop()
            return None
        header, table = self._bytes[: self._prefix.header_bytes], self._bytes[self._prefix.header_bytes :]
        frame = StreamFrame(self._prefix, bytes(header), bytes(table), self._views, self.lease)
        self._begin()
        return frame

    def _lay_out(self, prefix: Prefix, acquire: Callable[[int], Lease]) -> None:
        lengths = unpack_lengths(memoryview(self._bytes)[prefix.header_bytes :], prefix)
        if prefix.payload_bytes:
            self.lease = acquire(sum(map(align, lengths)))
        start = 0
        for nbytes in lengths:
            memory = self.lease.memory if self.lease else memoryview(bytearray(0))
            self._views.append(memory[start : start + nbytes])
            start += align(nbytes)
        self._unfilled = [view for view in reversed(self._views) if view.nbytes]
        self._laid_out = True
