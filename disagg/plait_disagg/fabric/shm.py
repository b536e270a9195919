"""Channels between processes of one host: control packets over a unix socket, payload in shared memory.

Each side owns one sealed segment (`segment.py`), registered with the peer once, when the channel
is made. Sending writes the payload into a lease of it (the one copy) and sends a packet that says
where; the receiver reads it in place and acknowledges on release, which returns the lease
(`credit.py`). Payloads up to `inline_bytes` ride in the packet itself. The socket is SOCK_SEQPACKET:
a packet arrives whole or not at all, so a time-out never tears a frame. When a process dies the
kernel closes its sockets and the peer sees it at once, wherever it waits.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from plait_disagg.fabric.base import ChannelBase, Deadline
from plait_disagg.fabric.credit import CreditLine
from plait_disagg.fabric.errors import (
    Closed,
    FabricError,
    PeerClosed,
    PeerLost,
    ProtocolViolation,
    RecvTimeout,
    SendTimeout,
)
from plait_disagg.fabric.frames import (
    PREFIX_BYTES,
    Kind,
    decode_header,
    pack_head,
    pack_lengths,
    pack_places,
    unpack_lengths,
    unpack_places,
    unpack_prefix,
)
from plait_disagg.fabric.pool import Lease, Pool
from plait_disagg.fabric.segment import Segment
from plait_disagg.fabric.staging import Part, align, leases_of, part_view, stage
from plait_disagg.fabric.values import MAX_INLINE_BYTES, FabricOptions, Message
from plait_disagg.fabric.waiting import POLL_IN, POLL_OUT, Waiter

__all__ = ["ShmChannel"]

_SOCKET_BUFFER_BYTES = 1 << 20


class ShmChannel(ChannelBase):
    """One connected, authenticated pair of segments."""

    def __init__(
        self,
        *,
        control: socket.socket,
        credit: socket.socket,
        outgoing: Segment,
        incoming: Segment,
        peer: str,
        options: FabricOptions,
    ) -> None:
        """Own both sockets; `outgoing` is ours to write, `incoming` is the peer's."""
        for sock in (control, credit):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self._credit = CreditLine(credit, self._fail)
        super().__init__(pool=Pool(outgoing.memory, gate=self._credit), peer=peer, limits=options.limits)
        self._control = control
        self._incoming = incoming
        self._inline_bytes = options.inline_bytes
        self._in_flight_messages = options.in_flight_messages
        limits = options.limits
        largest = PREFIX_BYTES + limits.header_bytes + 8 * (1 + 2 * limits.buffers) + MAX_INLINE_BYTES
        self._packet = memoryview(bytearray(largest + 1))
        self._writable = Waiter(control.fileno(), events=POLL_OUT)
        self._readable = Waiter(control.fileno(), events=POLL_IN)

    def _deliver(self, header: bytes, parts: list[Part], deadline: Deadline) -> None:
        nbytes = sum(part.nbytes for part in parts)
        if nbytes <= self._inline_bytes and not any(map(self._is_ours, leases_of(parts))):
            self._send_inline(header, parts, nbytes, deadline)
        else:
            self._send_shared(header, parts, nbytes, deadline)

    def _send_inline(self, header: bytes, parts: list[Part], nbytes: int, deadline: Deadline) -> None:
        lengths = [part.nbytes for part in parts]
        head = pack_head(Kind.MESSAGE, header, pack_lengths(lengths), buffers=len(lengths), payload_bytes=nbytes)
        self._write([head, *map(part_view, parts)], deadline)
        for lease in leases_of(parts):
            lease.release()

    def _send_shared(self, header: bytes, parts: list[Part], nbytes: int, deadline: Deadline) -> None:
        self._wait_for_credit(deadline)
        staged = stage(self._pool, parts, deadline.left_s(), self._is_ours)
        message_id = self._credit.charge(staged.leases)
        places = [(lease.offset + start, length) for lease, start, length in staged.places]
        table = pack_places(message_id, places)
        try:
            self._write([pack_head(Kind.SHARED, header, table, buffers=len(places), payload_bytes=nbytes)], deadline)
        except BaseException:
            for lease in self._credit.refund(message_id):
                lease.release()
            raise

    def _is_ours(self, lease: Lease) -> bool:
        return lease.pool is self._pool

    def _wait_for_credit(self, deadline: Deadline) -> None:
        if self._credit.in_flight < self._in_flight_messages:
            return
        self._credit.reap()
        if self._credit.in_flight < self._in_flight_messages:
            return
        self._count_send_wait()
        while True:
            ticket = self._credit.ticket()
            self._raise_if_unusable()
            if self._credit.in_flight < self._in_flight_messages:
                return
            if deadline.passed or not self._credit.wait(ticket, deadline.left_s()):
                raise SendTimeout(f"the peer released no message within {deadline.timeout_s} s")

    def _write(self, pieces: list[bytes | memoryview], deadline: Deadline) -> None:
        waited = False
        while True:
            try:
                self._control.sendmsg(pieces)
            except BlockingIOError:
                if not waited:
                    self._count_send_wait()
                    waited = True
                if not self._writable.wait(deadline.left_s()):
                    raise SendTimeout(f"the peer took no message for {deadline.timeout_s} s") from None
            except OSError as error:
                self._raise_if_unusable()
                raise self._lost(f"was lost while we sent: {error}") from error
            else:
                return

    def _collect(self, deadline: Deadline) -> tuple[Message, int]:
        if not isinstance(self._failure, PeerLost):
            self._raise_if_unusable()
        packet = self._read_packet(deadline)
        try:
            return self._parse(packet)
        except FabricError as error:
            if not isinstance(error, PeerClosed):
                self._fail(error)
                self._hang_up(goodbye=False)
            raise

    def _read_packet(self, deadline: Deadline) -> memoryview:
        waited = False
        while True:
            try:
                received = self._control.recv_into(self._packet)
            except BlockingIOError:
                if not waited:
                    self._count_recv_wait()
                    waited = True
                if not self._readable.wait(deadline.left_s()):
                    raise RecvTimeout(f"no message within {deadline.timeout_s} s") from None
            except ConnectionResetError:
                continue  # reported once, ahead of what the peer had sent before it went
            except OSError as error:
                self._raise_if_unusable()
                raise self._lost(f"was lost: {error}") from error
            else:
                if received:
                    return self._packet[:received]
                self._raise_if_unusable()
                raise self._lost("hung up")

    def _parse(self, packet: memoryview) -> tuple[Message, int]:
        if not PREFIX_BYTES <= len(packet) < len(self._packet):
            raise ProtocolViolation("the peer sent a packet of impossible size")
        prefix = unpack_prefix(packet, self._limits)
        if prefix.kind is Kind.GOODBYE:
            raise self._fail(PeerClosed(f"the peer {self._peer} closed the channel"))
        table_at = PREFIX_BYTES + prefix.header_bytes
        payload_at = table_at + prefix.table_bytes
        inline_bytes = prefix.payload_bytes if prefix.kind is Kind.MESSAGE else 0
        if len(packet) != payload_at + inline_bytes:
            raise ProtocolViolation("the peer's packet does not have the length that it announces")
        header = decode_header(bytes(packet[PREFIX_BYTES:table_at]))
        table = packet[table_at:payload_at]
        if prefix.kind is Kind.MESSAGE:
            views = _unpack_inline(packet[payload_at:], unpack_lengths(table, prefix))
            return Message(header, views, self._count_release), prefix.payload_bytes
        message_id, places = unpack_places(table, prefix, self._incoming.nbytes)
        views = [self._incoming.memory[offset : offset + nbytes] for offset, nbytes in places]
        return Message(header, views, self._releaser(message_id)), prefix.payload_bytes

    def _releaser(self, message_id: int) -> Callable[[], None]:
        def release() -> None:
            self._count_release()
            self._credit.acknowledge(message_id)

        return release

    def _hang_up(self, *, goodbye: bool) -> None:
        try:
            if goodbye:
                self._control.send(pack_head(Kind.GOODBYE, b"", b"", buffers=0, payload_bytes=0))
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._credit.hang_up(goodbye=goodbye)

    def close(self) -> None:
        """See `Channel.close`."""
        if not self._close_once():
            return
        self._pool.shut(Closed("this side of the channel was closed"))
        self._hang_up(goodbye=True)
        with self._sending, self._receiving:
            self._control.close()
            self._credit.close()


def _unpack_inline(payload: memoryview, lengths: tuple[int, ...]) -> list[memoryview]:
    """Move an inline payload out of the packet buffer, each buffer on its alignment."""
    room = memoryview(bytearray(sum(map(align, lengths))))
    views: list[memoryview] = []
    start = taken = 0
    for nbytes in lengths:
        room[start : start + nbytes] = payload[taken : taken + nbytes]
        views.append(room[start : start + nbytes])
        start += align(nbytes)
        taken += nbytes
    return views
