"""Common parts of all channels: validation, locks, counters and the reason why the channel ended; moving what the
caller sends into the pool, and what of it the peer has not released yet.

A new transport (UCX, verbs) subclasses `ChannelBase`: `_deliver` sends parts, `_collect`
receives a message, `close` and `_hang_up` wake both. Its pool leases registered memory (`Pool` over a
registered arena, with a `Credit` that polls completions); `endpoints` gains a scheme and the
conformance suite one fixture. Features that only change behaviour (`modelled`) wrap any `Channel`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from plait_fabric.errors import (
    BadTensor,
    ChannelClosed,
    FabricError,
    FrameTooLarge,
    PeerLost,
    PoolExhausted,
    ProtocolViolation,
    SendTimeout,
)
from plait_fabric.memory.pool import Lease, Pool, align, release_all
from plait_fabric.protocols import Buffer, Header
from plait_fabric.transport.frames import FrameKind, encode_header, pack_head, pack_places
from plait_fabric.values import ChannelStatistics, Message, MessageLimits
from plait_fabric.waiting import Deadline, has_hung_up, pauses

log = logging.getLogger(__name__)

_NEVER = Deadline(None)

Part = Lease | memoryview
"""A piece of payload that the channel owns (a lease) or may read until `send` returns (a flat view)."""


class Credit(ABC):
    """The leases of messages that the peer has not released yet, by the numbers of the messages; also the `Gate` of the
    pool that they are of. Subclasses learn what was released."""

    def __init__(self, in_flight_messages: int, sock: socket.socket, lost: Callable[[], FabricError]) -> None:
        """`sock` is the channel's; once its peer has hung up, `lost` returns or raises the reason, until `let_go`."""
        self._in_flight_messages = in_flight_messages
        self._sock = sock
        self._lost = lost
        self._outstanding: dict[int, Sequence[Lease]] = {}

    @property
    def spent(self) -> bool:
        """Whether no further message may be sent, as far as is known."""
        return len(self._outstanding) >= self._in_flight_messages

    @abstractmethod
    def charge(self, leases: Sequence[Lease]) -> int:
        """Record a message that is about to be sent; return its number."""

    def refund(self, message_id: int) -> None:
        """Give back the leases of a message that could not be sent."""
        release_all(self._outstanding.pop(message_id, ()))

    def let_go(self) -> None:
        """Forget the channel, lest a cycle keep its memory: `lost` refers to it, a lease to its pool. The leases are
        not given back: the peer may still read them."""
        self._lost = lambda: PeerLost("the channel was closed")
        self._outstanding.clear()

    def check(self) -> None:
        """Learn what was released. Raises the reason if the peer has hung up, and what `read` raises."""
        self.read()
        if has_hung_up(self._sock):
            raise self._lost()

    def reap(self) -> None:
        """Learn what was released."""
        with contextlib.suppress(FabricError):  # the channel has it
            self.read()

    @abstractmethod
    def read(self) -> None:
        """Take back the leases of what was released. Raises `ProtocolViolation`."""


class ChannelBase(ABC):
    """A channel without the transport: subclasses move parts (`_deliver`) and messages (`_collect`)."""

    def __init__(self, *, pool: Pool, peer: str, limits: MessageLimits) -> None:
        self.pool = pool
        self.peer = peer
        self._limits = limits
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._counting = threading.Lock()
        self._failure: FabricError | None = None
        self._counted = ChannelStatistics()
        """What a direction counts is written by the thread that has its lock."""
        self._released = 0

    @property
    def closed(self) -> bool:
        """Whether this side was closed or the channel has failed."""
        return self._failure is not None

    def send(self, header: Header, buffers: Sequence[Buffer] = (), *, timeout_s: float | None = None) -> None:
        """Validate the message, take over its leases and deliver it."""
        parts = take_over(buffers)
        try:
            encoded = encode_header(header)
            nbytes = 0
            for part in parts:
                nbytes += part.nbytes
            self._limits.check(len(encoded), len(parts), nbytes)
            if not self._sending.acquire(timeout=-1 if timeout_s is None else timeout_s):
                raise SendTimeout(f"another message to {self.peer} has not left within {timeout_s} s")
            try:
                self._raise_if_unusable()
                self._deliver(encoded, parts, _NEVER if timeout_s is None else Deadline(timeout_s))
                self._counted.messages_sent += 1
                self._counted.bytes_sent += nbytes
            finally:
                self._sending.release()
        except BaseException:
            release_all(parts)
            raise

    def recv(self, timeout_s: float | None = None) -> Message:
        """Collect the next message and count it. What had arrived from a peer that is lost comes first."""
        with self._receiving:
            if not isinstance(self._failure, PeerLost):
                self._raise_if_unusable()
            try:
                message, nbytes = self._collect(_NEVER if timeout_s is None else Deadline(timeout_s))
            except FabricError as error:
                if not error.channel_usable and not isinstance(error, PeerLost | ChannelClosed):
                    self._fail(error)
                    self._hang_up()
                raise
            self._counted.messages_received += 1
            self._counted.bytes_received += nbytes
        return message

    def _send_placed(
        self, credit: Credit, header: bytes, parts: list[Part], deadline: Deadline, put: Callable[[bytes], None]
    ) -> tuple[int, list[Lease]]:
        """Leave a message in the pool until the peer has released it, and `put` a frame that says where in it. Return
        the message's number and its leases."""
        self._wait_for_credit(credit, deadline)
        leases, places = stage(self.pool, parts, deadline.left_s())
        number = credit.charge(leases)
        table, nbytes = pack_places(number, places), sum(length for _, length in places)
        try:
            put(pack_head(FrameKind.SHARED, header, table, buffers=len(places), payload_bytes=nbytes))
        except BaseException:
            credit.refund(number)
            raise
        return number, leases

    def _wait_for_credit(self, credit: Credit, deadline: Deadline) -> None:
        if credit.spent:
            credit.reap()
        if not credit.spent:
            return
        self._counted.send_waits += 1
        for _ in pauses():
            self._raise_if_unusable()
            credit.check()
            if not credit.spent:
                return
            if deadline.passed:
                raise SendTimeout(f"the peer released no message within {deadline.timeout_s} s")

    @abstractmethod
    def _deliver(self, header: bytes, parts: list[Part], deadline: Deadline) -> None:
        """Send one message. Leases that it keeps must outlive the call; it releases the others."""

    @abstractmethod
    def _collect(self, deadline: Deadline) -> tuple[Message, int]:
        """Receive one message; return it with the number of its payload bytes."""

    @abstractmethod
    def _hang_up(self) -> None:
        """End both directions without a goodbye, because of a failure."""

    @abstractmethod
    def close(self) -> None:
        """Close this side and wake both directions."""

    def statistics(self) -> ChannelStatistics:
        """Return a snapshot of the counters and the pool."""
        counted, in_pool = self._counted, self.pool.statistics()
        return replace(
            counted,
            copies=counted.copies + in_pool.copies,
            copied_bytes=counted.copied_bytes + in_pool.copied_bytes,
            send_waits=counted.send_waits + in_pool.waits,
            open_messages=counted.messages_received - self._released,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _fail(self, failure: FabricError) -> FabricError:
        """Record why the channel ended (the first reason stays) and return it, ready to raise."""
        with self._counting:
            first = self._failure is None
            known = self._failure = self._failure or _afresh(failure)
        if first and isinstance(failure, ProtocolViolation | FrameTooLarge):
            log.warning("fabric: the channel to %s is cut off: %s", self.peer, failure)
        return _afresh(known)

    def _raise_if_unusable(self) -> None:
        if self._failure is not None:
            raise _afresh(self._failure)

    def _lost(self, what: str) -> FabricError:
        return self._fail(PeerLost(f"the peer {self.peer} {what}"))

    def _close_once(self) -> bool:
        """Mark this side closed; return False if it already was (a lost peer still counts as not closed)."""
        with self._counting:
            if isinstance(self._failure, ChannelClosed):
                return False
            self._failure = ChannelClosed("this side of the channel was closed")
            return True

    def _count_release(self) -> None:
        with self._counting:
            self._released += 1


def _afresh(failure: FabricError) -> FabricError:
    """Return the same failure without a traceback, which would keep the channel and its memory alive."""
    return type(failure)(str(failure), channel_usable=False)


def part_view(part: Part) -> memoryview:
    """Return the bytes of a part."""
    return part.memory if isinstance(part, Lease) else part


def take_over(buffers: Sequence[Buffer]) -> list[Part]:
    """Take ownership of the caller's leases and flatten its bytes; on error every live lease is released."""
    parts: list[Part] = []
    if not buffers:
        return parts
    try:
        for buffer in buffers:  # one by one, so that a failure knows what was taken
            parts.append(buffer.hand_over() if isinstance(buffer, Lease) else _flat(buffer))  # noqa: PERF401
    except BaseException:
        release_all([*parts, *buffers])
        raise
    return parts


def _flat(buffer: memoryview | bytes | bytearray) -> memoryview:
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise BadTensor(f"a buffer must be a lease or bytes-like, got {type(buffer).__name__}") from error
    if not view.c_contiguous:
        raise BadTensor("a buffer must be C-contiguous; copy it into a lease instead")
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def stage(pool: Pool, parts: Sequence[Part], timeout_s: float | None) -> tuple[list[Lease], list[tuple[int, int]]]:
    """Copy what is not a lease of `pool` into one of it. Return the leases that hold the message, and for each buffer
    where it is in the pool and its length.

    Raises `SendTimeout` when no room became free in time, `PoolExhausted` when it never can.
    """
    leases = [part for part in parts if isinstance(part, Lease) and part.pool is pool]
    room = None
    if len(leases) < len(parts):
        copied_bytes = sum(align(part.nbytes) for part in parts if not isinstance(part, Lease) or part.pool is not pool)
        try:
            room = pool.acquire(copied_bytes, timeout_s)
        except PoolExhausted as error:
            if pool.can_ever_lease(copied_bytes):
                raise SendTimeout(f"the peer holds all buffers: {error}") from error
            raise
        leases.append(room)
    places: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        if isinstance(part, Lease) and part.pool is pool:
            places.append((part.offset, part.nbytes))
            continue
        assert room is not None
        if part.nbytes:
            room.write(part_view(part), start)
        places.append((room.offset + start, part.nbytes))
        start += align(part.nbytes)
        release_all([part])
    return leases, places
