"""Channels between processes of one host: control packets and payload in shared memory, a socket to wake the peer.

Each side owns one sealed segment (`segment.py`), registered with the peer once, when the channel
is made. Sending writes the payload into a lease of it (the only copy) and puts a packet with its
location into a ring at the segment's beginning (`ring.py`); the receiver reads the payload in place and marks it
there on release, which returns the lease (`RingCredit`). Payloads up to `inline_bytes` travel in
the packet itself. A packet is either complete or absent, so a timeout never tears a frame.

The socket carries one byte to a peer that sleeps, and nothing while it is awake. When a process dies
the kernel closes its sockets and the peer notices at once, wherever it waits; what the dead process had put
into the ring is still there and arrives first.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from plait_fabric.errors import ChannelClosed, FabricError, PeerClosed, ProtocolViolation, RecvTimeout, SendTimeout
from plait_fabric.memory.pool import Lease, Pool, align, release_all
from plait_fabric.memory.ring import MAX_RELEASES, RingReader, RingWriter, ring_bytes
from plait_fabric.memory.segment import create_segment
from plait_fabric.transport.base import ChannelBase, Credit, Part, part_view
from plait_fabric.transport.frames import (
    PREFIX_BYTES,
    FrameKind,
    decode_header,
    pack_message_head,
    pack_one,
    unpack_lengths,
    unpack_one,
    unpack_places,
    unpack_prefix,
)
from plait_fabric.values import MAX_INLINE_BYTES, FabricOptions, Message, MessageLimits
from plait_fabric.waiting import GONE, POLL_IN, Deadline, Waiter, pauses

_WAKE = b"!"
_LOOK_S = 1.0
"""How often a sleeping end also checks on its own. It is woken whenever there is something to read; this is a
safeguard."""
_LOOKS = 16
"""How often to check before letting other threads run: they wait for less than two microseconds."""
_TRUSTED_SENDS = 32
"""The number of packets sent to a peer that did not sleep, after which to check that it is still alive."""


def segment_with_ring(options: FabricOptions) -> tuple[memoryview, int]:
    """Return a segment with an empty ring, ready for the peer, and its descriptor to pass (the caller closes it)."""
    room = ring_bytes(_max_packet(options.limits))
    segment, descriptor = create_segment(room + options.pool_bytes)
    RingWriter(segment[:room])
    return segment, descriptor


def _max_packet(limits: MessageLimits) -> int:
    return PREFIX_BYTES + limits.header_bytes + 8 * (1 + 2 * limits.buffers) + MAX_INLINE_BYTES


class RingCredit(Credit):
    """Learns from words beside the packets of a ring, of which the peer sets one for each message that it releases."""

    def __init__(
        self, writer: RingWriter, in_flight_messages: int, sock: socket.socket, lost: Callable[[], FabricError]
    ) -> None:
        super().__init__(min(in_flight_messages, MAX_RELEASES), sock, lost)
        self._writer = writer
        self._reading = threading.Lock()

    def charge(self, leases: Sequence[Lease]) -> int:
        """Give the message the first number that no other has."""
        number = next(number for number in range(MAX_RELEASES) if number not in self._outstanding)
        self._writer.expect_release(number)
        self._outstanding[number] = leases
        return number

    def read(self) -> None:
        """Look at the words of all messages on their way, unless another thread does."""
        if not self._outstanding or not self._reading.acquire(blocking=False):
            return
        try:
            for number in [*self._outstanding]:
                if self._writer.is_released(number):
                    release_all(self._outstanding.pop(number, ()))
        finally:
            self._reading.release()


class ShmChannel(ChannelBase):
    """One connected, authenticated pair of segments."""

    def __init__(
        self,
        *,
        control: socket.socket,
        outgoing: memoryview,
        incoming: memoryview,
        peer: str,
        options: FabricOptions,
    ) -> None:
        """Take ownership of the socket.

        `outgoing` is ours to write (the ring, then the pool), `incoming` is the peer's. Raises `ProtocolViolation`
        when the peer's segment has no ring.
        """
        control.setblocking(False)
        ours = ring_bytes(_max_packet(options.limits))
        self._reader = RingReader(incoming)
        self._writer = RingWriter(outgoing[:ours])
        self._arrivals = incoming[self._reader.nbytes :]
        self._credit = RingCredit(self._writer, options.in_flight_messages, control, self._closed_error)
        super().__init__(pool=Pool(outgoing[ours:], gate=self._credit), peer=peer, limits=options.limits)
        self._control = control
        self._inline_bytes = options.inline_bytes
        self._spin_s = options.spin_s
        self._max_packet = _max_packet(options.limits)
        self._trusted = 0
        self._readable = Waiter(control.fileno(), events=POLL_IN)
        self._broken = Waiter(control.fileno(), events=0)

    def _deliver(self, header: bytes, parts: list[Part], deadline: Deadline) -> None:
        if len(parts) == 1 and isinstance(parts[0], memoryview) and parts[0].nbytes <= self._inline_bytes:
            self._write(pack_one(header, parts[0].nbytes), deadline, parts)
            return
        lengths = [part.nbytes for part in parts]
        if sum(lengths) > self._inline_bytes or any(type(part) is Lease and part.pool is self.pool for part in parts):
            self._send_placed(self._credit, header, parts, deadline, lambda head: self._write(head, deadline))
        else:
            self._write(pack_message_head(header, lengths), deadline, parts)
            release_all(parts)

    def _write(self, head: bytes, deadline: Deadline, parts: Sequence[Part] = ()) -> None:
        """Put a packet into the ring: the only copy of a payload that travels in it."""
        payload = [part_view(part) for part in parts]
        if not self._writer.put(head, payload):
            self._wait_for_room(head, payload, deadline)
        if payload:
            self._counted.copies += 1
            self._counted.copied_bytes += sum(map(len, payload))
        if self._writer.must_wake():
            self._wake()
        else:
            self._trusted += 1
            if self._trusted % _TRUSTED_SENDS == 0 and self._broken.wait(0.0):
                raise self._closed_error()

    def _wait_for_room(self, head: bytes, payload: Sequence[memoryview], deadline: Deadline) -> None:
        self._counted.send_waits += 1
        for _ in pauses():
            if self._writer.put(head, payload):
                return
            self._raise_if_unusable()
            if deadline.passed:
                raise SendTimeout(f"the peer took no message for {deadline.timeout_s} s")
            if self._broken.wait(0.0):
                raise self._closed_error()

    def _wake(self) -> None:
        try:
            self._control.send(_WAKE)
        except BlockingIOError:
            return  # it has more than one of these to read
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._closed_error() from error
        except OSError as error:
            self._raise_if_unusable()
            raise self._lost(f"was lost while we sent: {error}") from error

    def _read_packet(self, deadline: Deadline) -> bytes:
        packet = self._reader.take() or self._spin(deadline)
        if packet is not None:
            return packet
        waited = closed = False
        while True:
            self._reader.sleeps(True)
            try:
                packet = self._reader.take()
                if packet is not None:
                    return packet
                if closed:
                    raise self._closed_error()
                if not waited:
                    self._counted.recv_waits += 1
                    waited = True
                left_s = deadline.left_s()
                if self._readable.wait(_LOOK_S if left_s is None else min(left_s, _LOOK_S)):
                    closed = self._hear()  # and look once more: what was put before the end comes first
                elif deadline.passed:
                    raise RecvTimeout(f"no message within {deadline.timeout_s} s")
            finally:
                self._reader.sleeps(False)

    def _spin(self, deadline: Deadline) -> bytes | None:
        """Poll for a packet for `spin_s`."""
        if not self._spin_s:
            return None
        until_s = time.monotonic() + self._spin_s
        ready = self._reader.ready
        while self._failure is None and time.monotonic() < until_s and not deadline.passed:
            for _ in range(_LOOKS):
                if ready():
                    return self._reader.take()
            if self._readable.wait(0.0):  # we are woken, or the peer is gone; and other threads had a chance to run
                return None
        return None

    def _hear(self) -> bool:
        """Read the wake-up bytes from the socket; return True if the peer is lost."""
        try:
            woken = self._control.recv(len(_WAKE) + 1)
        except (BlockingIOError, ConnectionResetError):
            return False  # the latter is reported once, ahead of what the peer had sent before it went
        except OSError as error:
            self._raise_if_unusable()
            raise self._lost(f"was lost: {error}") from error
        if woken not in (_WAKE, b""):
            raise ProtocolViolation("the peer sent something that is not a fabric packet")
        return not woken

    def _closed_error(self) -> FabricError:
        self._raise_if_unusable()
        if self._reader.said_goodbye():
            return self._fail(PeerClosed(f"the peer {self.peer} closed the channel"))
        return self._lost(GONE)

    def _collect(self, deadline: Deadline) -> tuple[Message, int]:
        packet = self._read_packet(deadline)
        one = unpack_one(packet, self._limits)
        if one is not None:
            return Message(one[0], (memoryview(one[1]),), self._count_release, lent=False), len(one[1])
        if not PREFIX_BYTES <= len(packet) <= self._max_packet:
            raise ProtocolViolation("the peer sent a packet of impossible size")
        prefix = unpack_prefix(packet, self._limits)
        if prefix.kind is FrameKind.GOODBYE:
            raise self._fail(PeerClosed(f"the peer {self.peer} closed the channel"))
        table_at = PREFIX_BYTES + prefix.header_bytes
        payload_at = table_at + prefix.table_bytes
        inline_bytes = prefix.payload_bytes if prefix.kind is FrameKind.MESSAGE else 0
        if len(packet) != payload_at + inline_bytes:
            raise ProtocolViolation("the peer's packet does not have the length that it announces")
        header = decode_header(packet[PREFIX_BYTES:table_at])
        table = packet[table_at:payload_at]
        if prefix.kind is FrameKind.MESSAGE:
            views = _unpack_inline(packet[payload_at:], unpack_lengths(table, prefix))
            return Message(header, views, self._count_release, lent=False), prefix.payload_bytes
        message_id, places = unpack_places(table, prefix, len(self._arrivals))
        if message_id >= MAX_RELEASES:
            raise ProtocolViolation(f"the peer sent a message of number {message_id}")
        views = [self._arrivals[offset : offset + nbytes] for offset, nbytes in places]
        return Message(header, views, self._releaser(message_id)), prefix.payload_bytes

    def _releaser(self, message_id: int) -> Callable[[], None]:
        def release() -> None:
            self._count_release()
            self._reader.release(message_id)

        return release

    def _hang_up(self, *, goodbye: bool = False) -> None:
        if goodbye:
            self._writer.say_goodbye()
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Say goodbye, end the socket and wake all waiters."""
        if not self._close_once():
            return
        self.pool.shut(ChannelClosed("this side of the channel was closed"))
        self._hang_up(goodbye=True)
        with self._sending, self._receiving:
            self._control.close()
            self._credit.let_go()


def _unpack_inline(payload: bytes, lengths: tuple[int, ...]) -> list[memoryview]:
    """Copy an inline payload out of the packet, each buffer at its alignment."""
    room = memoryview(bytearray(sum(map(align, lengths))))
    views: list[memoryview] = []
    start = taken = 0
    for nbytes in lengths:
        room[start : start + nbytes] = payload[taken : taken + nbytes]
        views.append(room[start : start + nbytes])
        start += align(nbytes)
        taken += nbytes
    return views
