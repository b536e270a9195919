"""Channels over TCP: frames gathered from the caller's memory, received straight into pooled leases.

Sending copies nothing in this process (`sendmsg` reads the caller's memory); receiving reads into
the lease that backs the message. When a peer dies, its socket closes and we notice at once; a host
that silently disconnects is noticed after about 5 + 3 x 2 s: by keepalive while idle, and by
missing acknowledgements while data is in flight (TCP_USER_TIMEOUT, RFC 5482). A peer
that stops in the middle of a frame is disconnected after `stall_timeout_s`.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from plait_fabric.errors import (
    AddressInUse,
    BadAddress,
    ChannelClosed,
    ConnectTimeout,
    FrameTooLarge,
    PeerClosed,
    PeerLost,
    ProtocolViolation,
    RecvTimeout,
    SendTimeout,
    Unreachable,
)
from plait_fabric.memory.pool import Lease, Pool, release_all
from plait_fabric.protocols import Channel
from plait_fabric.transport.acceptor import Greet, Listener
from plait_fabric.transport.base import ChannelBase, Part, part_view
from plait_fabric.transport.frames import (
    FrameKind,
    FrameReader,
    StreamFrame,
    decode_header,
    pack_head,
    pack_message_head,
)
from plait_fabric.transport.greeting import PROOF_BYTES, authenticate, introduce, receive
from plait_fabric.values import Address, FabricOptions, Message, Scheme
from plait_fabric.waiting import GONE, POLL_IN, POLL_OUT, Deadline, Waiter

_GATHER = 512
"""Max buffers per `sendmsg`; IOV_MAX is 1024 on Linux."""
_SURELY_FITS = 8_192
"""A socket counts as writable while a third of its buffer is free, and the smallest buffer has 87,040 bytes."""
_KEEPALIVE_PROBES = 3


class TcpChannel(ChannelBase):
    """One connected, authenticated stream."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        options: FabricOptions,
        *,
        pool: Pool | None = None,
        announces: bool = False,
    ) -> None:
        """Take ownership of the socket. A subclass may have a `pool` of its own, and frames that only announce."""
        super().__init__(pool=pool or Pool.anonymous(options.pool_bytes), peer=peer, limits=options.limits)
        self._sock = sock
        self._inbound_pool = Pool.anonymous(options.pool_bytes)
        self._reader = FrameReader(options.limits, announces=announces)
        self._stall_timeout_s = options.stall_timeout_s
        self._spin_s = options.spin_s
        self._heard_s = time.monotonic()
        _tune(sock, options)
        self._writable = Waiter(sock.fileno(), events=POLL_OUT)
        self._readable = Waiter(sock.fileno(), events=POLL_IN)

    def _deliver(self, header: bytes, parts: list[Part], deadline: Deadline) -> None:
        views = [part_view(part) for part in parts]
        lengths = [view.nbytes for view in views]
        head = pack_message_head(header, lengths)
        if deadline.timeout_s == 0:
            self._raise_unless_it_fits(len(head) + sum(lengths))
        self._write([memoryview(head), *(view for view in views if view.nbytes)], deadline)
        release_all(parts)

    def _raise_unless_it_fits(self, nbytes: int) -> None:
        """Refuse what a send without waiting might leave half sent."""
        if nbytes > _SURELY_FITS or not self._writable.wait(0.0):
            raise SendTimeout(f"the peer {self.peer} takes {nbytes} bytes only in time")

    def _write(self, views: list[memoryview], deadline: Deadline) -> None:
        whole = views
        try:
            while views:
                views = self._write_some(views, deadline)
        except BaseException as error:
            if views is whole or isinstance(error, PeerLost | ChannelClosed):
                raise
            # Part of a frame has left, so whatever comes next could not be understood.
            torn = error if isinstance(error, SendTimeout) else ProtocolViolation("a send was interrupted in mid-frame")
            self._fail(torn)
            self._hang_up()
            if torn is error:
                raise SendTimeout(f"{error}; a frame is half sent", channel_usable=False) from None
            raise

    def _write_some(self, views: list[memoryview], deadline: Deadline) -> list[memoryview]:
        waited = False
        while True:
            try:
                return _advance(views, self._sock.sendmsg(views[:_GATHER]))
            except BlockingIOError:
                if not waited:
                    self._counted.send_waits += 1
                    waited = True
                if not self._writable.wait(deadline.left_s()):
                    raise SendTimeout(f"the peer {self.peer} took no data for {deadline.timeout_s} s") from None
            except OSError as error:
                self._raise_if_unusable()
                raise self._lost(f"was lost while we sent: {error}") from error

    def _collect(self, deadline: Deadline) -> tuple[Message, int]:
        frame = self._read_frame(deadline)
        if frame.prefix.kind is FrameKind.GOODBYE:
            raise self._fail(PeerClosed(f"the peer {self.peer} closed the channel"))
        header = decode_header(frame.header)
        return Message(header, frame.views, self._releaser(frame)), frame.prefix.payload_bytes

    def _read_frame(self, deadline: Deadline) -> StreamFrame:
        reader = self._reader
        waited = False
        while True:
            if not reader.wanted:
                frame = reader.step(lambda nbytes: self._room(nbytes, deadline))
                if frame is not None:
                    return frame
                continue
            try:
                received = self._sock.recv_into(reader.wanted)
            except BlockingIOError:
                if not waited:
                    self._counted.recv_waits += 1
                    waited = True
                self._wait_for_bytes(deadline)
                continue
            except OSError as error:
                self._raise_if_unusable()
                raise self._lost(GONE if isinstance(error, ConnectionResetError) else f"was lost: {error}") from error
            if not received:
                self._raise_if_unusable()
                raise self._lost("is gone in the middle of a message" if reader.begun else GONE)
            self._heard_s = time.monotonic()
            reader.filled(received)

    def _wait_for_bytes(self, deadline: Deadline) -> None:
        """Wait until the socket is readable, or until it is time to check again."""
        left_s = deadline.left_s()
        nap_s = self._longest_nap_s()
        if nap_s is not None:
            left_s = nap_s if left_s is None else min(left_s, nap_s)
        if self._reader.begun:
            patience_s = self._heard_s + self._stall_timeout_s - time.monotonic()
            if patience_s <= 0:
                raise ProtocolViolation(f"the peer sent part of a frame, then nothing for {self._stall_timeout_s} s")
            left_s = patience_s if left_s is None else min(left_s, patience_s)
        if not self._readable.wait(left_s, spin_s=self._spin_s) and deadline.passed:
            raise RecvTimeout(f"no message within {deadline.timeout_s} s")

    def _longest_nap_s(self) -> float | None:
        """Return how long a receiver may sleep before it looks again without being woken."""
        return None

    def _room(self, nbytes: int, deadline: Deadline) -> Lease:
        if not self._inbound_pool.can_ever_lease(nbytes):
            raise FrameTooLarge(f"the peer sends {nbytes} bytes; our pool has {self._inbound_pool.capacity_bytes}")
        return self._inbound_pool.acquire(nbytes, deadline.left_s())

    def _releaser(self, frame: StreamFrame) -> Callable[[], None]:
        lease = frame.lease

        def release() -> None:
            self._count_release()
            release_all([lease])

        return release

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Send a goodbye frame unless a send is in progress, then shut down the socket and both pools."""
        if not self._close_once():
            return
        if self._sending.acquire(blocking=False):
            with suppress(OSError):
                self._sock.send(pack_head(FrameKind.GOODBYE, b"", b"", buffers=0, payload_bytes=0))
            self._sending.release()
        self._hang_up()
        ended = ChannelClosed("this side of the channel was closed")
        self.pool.shut(ended)
        self._inbound_pool.shut(ended)
        with self._sending, self._receiving:
            self._sock.close()
            release_all([self._reader.lease])


def _advance(views: list[memoryview], sent: int) -> list[memoryview]:
    """Return what is left to send after `sent` bytes."""
    for index, view in enumerate(views):
        if sent < view.nbytes:
            return [view[sent:], *views[index + 1 :]]
        sent -= view.nbytes
    return []


def _tune(sock: socket.socket, options: FabricOptions) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle_s = options.tcp_keepalive_idle_s
    interval_s = max(1, idle_s // 2)
    for option, value in (
        (socket.TCP_KEEPIDLE, idle_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, _KEEPALIVE_PROBES),
        (socket.TCP_USER_TIMEOUT, 1000 * (idle_s + _KEEPALIVE_PROBES * interval_s)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def connect(address: Address, secret: bytes, options: FabricOptions, deadline: Deadline) -> TcpChannel:
    """Connect and authenticate; see `endpoints.connect`."""
    sock = dial(address, secret, deadline)
    try:
        return TcpChannel(sock, str(address), options)
    except BaseException:
        sock.close()
        raise


def dial(address: Address, secret: bytes, deadline: Deadline) -> socket.socket:
    """Return a socket whose two ends have authenticated each other for the channels of the address's scheme."""
    try:
        sock = socket.create_connection((address.target, address.port), timeout=deadline.left_s())
    except TimeoutError as error:
        raise ConnectTimeout(f"{address} did not answer within {deadline.timeout_s} s") from error
    except OSError as error:
        raise Unreachable(f"nobody listens at {address}: {error}") from error
    try:
        sock.setblocking(False)
        check = introduce(sock, secret, address.scheme, deadline)
        check(receive(sock, PROOF_BYTES, deadline))
        return sock
    except BaseException:
        sock.close()
        raise


def welcome(sock: socket.socket, secret: bytes, scheme: Scheme, deadline: Deadline) -> str:
    """The part of a greeting in which two ends authenticate each other, as `dial` does at the other end, whose address
    is returned."""
    sock.send(authenticate(sock, secret, scheme, deadline))
    host, port, *_ = sock.getpeername()
    return str(Address(scheme=scheme, target=host, port=port))


def listen(address: Address, secret: bytes, options: FabricOptions) -> Listener:
    """Listen; see `endpoints.listen`. Port 0 takes a free port."""

    def greet(sock: socket.socket, deadline: Deadline) -> Channel:
        return TcpChannel(sock, welcome(sock, secret, "tcp", deadline), options)

    return listen_with(address, options, greet)


def listen_with(address: Address, options: FabricOptions, greet: Greet) -> Listener:
    """Listen for connections that are greeted so. Raises `BadAddress`, `AddressInUse`."""
    family = socket.AF_INET6 if ":" in address.target else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.target, address.port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        if isinstance(error, socket.gaierror):
            raise BadAddress(f"cannot resolve {address}: {error}") from error
        kind = AddressInUse if error.errno == errno.EADDRINUSE else BadAddress
        raise kind(f"cannot listen at {address}: {error.strerror}") from error
    host, port, *_ = sock.getsockname()
    bound = str(Address(scheme=address.scheme, target=host, port=port))
    return Listener(sock, address=bound, options=options, greet=greet)
