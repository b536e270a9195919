"""The interfaces of the fabric. Everything else in this package implements or wraps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from plait_fabric.memory.pool import Lease, Pool
from plait_fabric.values import ChannelStatistics, Message

Header = Mapping[str, Any]
"""A small JSON object. Keys that begin with an underscore are reserved for the fabric."""

Buffer = Lease | memoryview | bytes | bytearray
"""A piece of payload: a lease of the channel's pool (handed over), or any contiguous bytes (copied)."""


class Channel(Protocol):
    """A two-way, ordered, message-oriented connection to one authenticated peer.

    Threads: one thread may send while another receives; `close` and `Message.release` may be called
    from any thread. A send may wait until the peer receives, so two peers that each send
    something large before either receives can deadlock: receive in another thread,
    or take turns. Delivery is at most once and in order. A channel is not inherited by a fork.
    """

    @property
    def pool(self) -> Pool:
        """The pool whose leases this channel sends without copying. Write a lease, then send it."""

    @property
    def peer(self) -> str:
        """Name of the other end, for logs."""

    @property
    def closed(self) -> bool:
        """True once this side was closed, the peer was lost or the peer violated the protocol."""

    def send(self, header: Header, buffers: Sequence[Buffer] = (), *, timeout_s: float | None = None) -> None:
        """Send one message.

        A `Lease` is handed over: after the call, even after one that raises, it no longer belongs to the
        caller. Bytes are copied (shm, inproc) or written to the socket (tcp) before the call
        returns, so the caller may change them at once. Waits for credit, and for a send of another
        thread, at most `timeout_s` seconds each (None: for ever; 0: not at all, and nothing is half sent).

        Raises `BadHeader`, `FrameTooLarge`, `PoolExhausted` (the message can never fit),
        `SendTimeout`, `ChannelClosed`, `PeerLost`.
        """

    def recv(self, timeout_s: float | None = None) -> Message:
        """Wait at most `timeout_s` seconds (None: for ever; 0: only check) for the next message.

        The caller owns the message until `Message.release()`. A caller that holds all the memory of a
        channel and then waits without a timeout for another message waits for ever: release first.
        Raises `RecvTimeout` (the channel stays usable and nothing is lost), `PoolExhausted` (likewise
        usable: release messages, then call again), `ProtocolViolation`, `FrameTooLarge`, `ChannelClosed`,
        `PeerLost` (at once, also while waiting; messages that had arrived come first).
        """

    def close(self) -> None:
        """Close the channel. Idempotent; wakes a `recv` or `send` that is waiting on either side.

        Messages that were sent but not yet received may be lost. Buffers of messages that were not released
        stay readable.
        """

    def statistics(self) -> ChannelStatistics:
        """Return a snapshot of the counters; works after `close`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None:
        """Close the channel."""
