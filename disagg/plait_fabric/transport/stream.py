"""A byte stream in frames, as it arrives. Sans-I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from plait_fabric.errors import ProtocolViolation
from plait_fabric.memory.pool import Lease, align
from plait_fabric.transport.frames import PREFIX_BYTES, FrameKind, Prefix, unpack_lengths, unpack_prefix
from plait_fabric.values import MessageLimits


class StreamFrame(NamedTuple):
    """A frame that has arrived. SHARED: its payload has not, and `table` says where it will be."""

    prefix: Prefix
    header: bytes
    table: bytes
    views: list[memoryview]
    lease: Lease | None


class FrameReader:
    """Splits a byte stream into frames. Sans-I/O and resumable: fill `wanted`, then call `step`."""

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
