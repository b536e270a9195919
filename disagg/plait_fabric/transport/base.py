"""Common parts of all channels: validation, locks, counters and the reason why the channel ended.

A new transport (UCX, verbs) subclasses `ChannelBase`: `_deliver` sends parts, `_collect`
receives a message, `close` wakes both. Its pool leases registered memory (`Pool` over a
registered arena, with a `Gate` that polls completions); `endpoints` gains a scheme and the
conformance suite one fixture. Features that only change behaviour (`modelled`) wrap any `Channel`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from plait_fabric.errors import ChannelClosed, FabricError, FrameTooLarge, PeerLost, ProtocolViolation, SendTimeout
from plait_fabric.memory.pool import Pool, release_all
from plait_fabric.protocols import Buffer, Header
from plait_fabric.transport.frames import encode_header
from plait_fabric.transport.staging import Part, leases_of, take_over
from plait_fabric.values import ChannelStatistics, Message, MessageLimits

log = logging.getLogger(__name__)

GONE = "is gone without a goodbye: it was killed, probably for memory, unless its log says otherwise"
"""What a peer's socket says when the kernel closed it: channels say goodbye, and who cuts a peer off logs why."""


class Deadline:
    """A time limit, or none (`timeout_s` None)."""

    __slots__ = ("_at_s", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at_s = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Return the seconds left, never negative, or None when there is no limit."""
        return None if self._at_s is None else max(0.0, self._at_s - time.monotonic())

    @property
    def passed(self) -> bool:
        """True when no time is left."""
        return self._at_s is not None and time.monotonic() >= self._at_s


_NEVER = Deadline(None)


class ChannelBase(ABC):
    """A channel without the transport: subclasses move parts (`_deliver`) and messages (`_collect`)."""

    def __init__(self, *, pool: Pool, peer: str, limits: MessageLimits) -> None:
        self._pool = pool
        self._peer = peer
        self._limits = limits
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._counting = threading.Lock()
        self._failure: FabricError | None = None
        # Messages and bytes in one tuple, replaced as a whole by the thread that has the direction's lock.
        self._sent = self._received = (0, 0)
        self._copied = (0, 0)
        self._send_waits = self._recv_waits = self._released = 0

    @property
    def pool(self) -> Pool:
        """The pool whose leases this channel sends without copying."""
        return self._pool

    @property
    def peer(self) -> str:
        """Name of the other end, for logs."""
        return self._peer

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
            if not self._limits.hold(len(encoded), len(parts), nbytes):
                self._limits.check(header_bytes=len(encoded), buffers=len(parts), message_bytes=nbytes)
            if not self._sending.acquire(timeout=-1 if timeout_s is None else timeout_s):
                raise SendTimeout(f"another message to {self._peer} has not left within {timeout_s} s")
            try:
                if self._failure is not None:
                    self._raise_if_unusable()
                self._deliver(encoded, parts, _NEVER if timeout_s is None else Deadline(timeout_s))
                messages, sent_bytes = self._sent
                self._sent = (messages + 1, sent_bytes + nbytes)
            finally:
                self._sending.release()
        except BaseException:
            release_all(leases_of(parts))
            raise

    def recv(self, timeout_s: float | None = None) -> Message:
        """Collect the next message and count it."""
        with self._receiving:
            message, nbytes = self._collect(_NEVER if timeout_s is None else Deadline(timeout_s))
            messages, received_bytes = self._received
            self._received = (messages + 1, received_bytes + nbytes)
        return message

    @abstractmethod
    def _deliver(self, header: bytes, parts: list[Part], deadline: Deadline) -> None:
        """Send one message. Leases that it keeps must outlive the call; it releases the others."""

    @abstractmethod
    def _collect(self, deadline: Deadline) -> tuple[Message, int]:
        """Receive one message; return it with the number of its payload bytes."""

    @abstractmethod
    def close(self) -> None:
        """Close this side and wake both directions."""

    def statistics(self) -> ChannelStatistics:
        """Return a consistent snapshot of the counters and the pool."""
        copies = self._pool.statistics()
        with self._counting:
            sent, received = self._sent, self._received
            return ChannelStatistics(
                messages_sent=sent[0],
                messages_received=received[0],
                bytes_sent=sent[1],
                bytes_received=received[1],
                copies=copies.copies + self._copied[0],
                copied_bytes=copies.copied_bytes + self._copied[1],
                send_waits=self._send_waits + copies.waits,
                recv_waits=self._recv_waits,
                open_messages=received[0] - self._released,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _fail(self, failure: FabricError) -> FabricError:
        """Record why the channel ended (the first reason stays) and return it, ready to raise."""
        with self._counting:
            first = self._failure is None
            if self._failure is None:
                self._failure = _afresh(failure)
            known = self._failure
        if first and isinstance(failure, ProtocolViolation | FrameTooLarge):
            log.warning("fabric: the channel to %s is cut off: %s", self._peer, failure)
        return _afresh(known)

    def _raise_if_unusable(self) -> None:
        failure = self._failure
        if failure is not None:
            raise _afresh(failure)

    def _lost(self, what: str) -> FabricError:
        return self._fail(PeerLost(f"the peer {self._peer} {what}"))

    def _close_once(self) -> bool:
        """Mark this side closed; return False if it already was (a lost peer still counts as not closed)."""
        with self._counting:
            if isinstance(self._failure, ChannelClosed):
                return False
            self._failure = ChannelClosed("this side of the channel was closed")
            return True

    def _count_copy(self, nbytes: int) -> None:
        """Record a copy that did not go into the pool. Call while sending."""
        copies, copied_bytes = self._copied
        self._copied = (copies + 1, copied_bytes + nbytes)

    def _count_send_wait(self) -> None:
        with self._counting:
            self._send_waits += 1

    def _count_recv_wait(self) -> None:
        with self._counting:
            self._recv_waits += 1

    def _count_release(self) -> None:
        with self._counting:
            self._released += 1


def _afresh(failure: FabricError) -> FabricError:
    """Return the same failure without a traceback, which would keep the channel and its memory alive."""
    return type(failure)(str(failure), channel_usable=False)
