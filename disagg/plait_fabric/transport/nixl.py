"""Channels whose large messages one side writes into the other's registered memory (RDMA where there is a card).

A message of less than `one_sided_from_bytes` is a TCP frame like any other (`tcp.py`): below some hundred kilobytes a
socket is faster. A larger one is announced on the same socket, so that the order of messages holds and a receiver may
sleep until then, and is then written to where its lease lies, in the memory that the receiver keeps for this sender;
with the last byte a note with the message's number arrives. The receiver answers with a note when the message is
released, which returns the lease. As the socket belongs to both, whoever dies is noticed by it at once.

A peer that says it has written may still write: like a peer on shared memory it is trusted with the contents of
messages, not with anything else.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from plait_fabric.errors import ChannelClosed, FabricError, PeerLost, ProtocolViolation, RecvTimeout, SendTimeout
from plait_fabric.memory.pool import Lease, Pool, release_all
from plait_fabric.transport.acceptor import Greeting, SocketListener, receive
from plait_fabric.transport.base import Deadline
from plait_fabric.transport.frames import FrameKind, pack_head, pack_places, unpack_places
from plait_fabric.transport.nixl_endpoint import DESCRIPTION_HEAD_BYTES, NixlEndpoint, description_bytes, load_nixl
from plait_fabric.transport.staging import Part, stage
from plait_fabric.transport.stream import StreamFrame
from plait_fabric.transport.tcp import TcpChannel, authenticate, dial, listen_with, peer_of
from plait_fabric.transport.waiting import finish_connect, has_hung_up, recv_exactly
from plait_fabric.values import Address, FabricOptions

_NOTE = struct.Struct("!cQ")
_WRITTEN, _RELEASED = b"w", b"r"
_BUSY_POLLS = 200
_PAUSE_S, _LAST_PAUSE_S = 5e-5, 1e-3
_MAX_WRITTEN = 1_024
_ATTENTIVE_S, _NAP_S, _LONG_NAP_S = 1.0, 1e-3, 0.05
"""How often a receiver that waits for a message lets the library work: a note that could not leave at once, because the
peers have just met, leaves only then. Often for so long after the last note, else rarely."""
_LAST_NOTE_S = 0.2
"""How long a note may be in flight from a peer that has hung up meanwhile."""


def _pauses() -> Iterator[None]:
    """Return at once a few hundred times, and then less and less often: nothing wakes who waits for a write."""
    for _ in range(_BUSY_POLLS):
        yield
        time.sleep(0)
    pause_s = _PAUSE_S
    while True:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        yield


class _Notes:
    """Both ends of the notes: which messages have been written here, and a `Gate` for what we wrote there."""

    def __init__(self, endpoint: NixlEndpoint, sock: socket.socket) -> None:
        self._endpoint = endpoint
        self._sock = sock
        self._lock = threading.Lock()
        self._outstanding: dict[int, Sequence[Lease]] = {}
        self._written: set[int] = set()
        self._last_id = self._openings = 0
        self.failure: FabricError | None = None
        self.noted_s = time.monotonic()

    @property
    def in_flight(self) -> int:
        """Messages written and not yet released, as far as is known."""
        return len(self._outstanding)

    def charge(self, leases: Sequence[Lease]) -> int:
        """Record a message that is about to be announced; return its number."""
        with self._lock:
            self._last_id += 1
            self._outstanding[self._last_id] = leases
            return self._last_id

    def refund(self, message_id: int) -> None:
        """Give back the leases of a message that was not announced."""
        with self._lock:
            leases = self._outstanding.pop(message_id)
        release_all(leases)

    def acknowledge(self, message_id: int) -> None:
        """Tell the peer that its message was released."""
        self.noted_s = time.monotonic()
        self._endpoint.tell(_NOTE.pack(_RELEASED, message_id))

    def take_written(self, message_id: int) -> bool:
        """Return whether the message is here, once."""
        self.read()
        with self._lock:
            if message_id not in self._written:
                return False
            self._written.remove(message_id)
            return True

    def read(self) -> None:
        """Make progress and take the notes that have come. Raises `ProtocolViolation`."""
        for note in self._endpoint.poll():
            if len(note) != _NOTE.size:
                raise self._refuse("a malformed note")
            kind, message_id = _NOTE.unpack(note)
            with self._lock:
                leases = self._outstanding.pop(message_id, None) if kind == _RELEASED else ()
                if kind == _WRITTEN and len(self._written) < _MAX_WRITTEN:
                    self._written.add(message_id)
                elif leases is None or kind != _RELEASED:
                    raise self._refuse("a note of a message that is not its")
                else:
                    self._openings += 1
            release_all(leases or ())

    def _refuse(self, what: str) -> ProtocolViolation:
        error = ProtocolViolation(f"the peer sent {what}")
        self.failure = error
        return error

    # The gate of the pool.

    def ticket(self) -> int:
        """Return the number of openings so far."""
        return self._openings

    def wait(self, ticket: int, timeout_s: float | None) -> bool:
        """Poll until something was released after `ticket`. Raises `PeerLost`, `ProtocolViolation`."""
        deadline = Deadline(timeout_s)
        for _ in _pauses():
            self.read()
            if self._openings != ticket:
                return True
            if has_hung_up(self._sock):
                raise PeerLost("the peer is gone")
            if deadline.passed:
                return False
        return False

    def open(self) -> None:
        """Record that memory was released on this side."""
        self._openings += 1

    def reap(self) -> None:
        """Take the notes that have come."""
        try:
            self.read()
        except FabricError:
            return  # `failure` has it


class NixlChannel(TcpChannel):
    """One connected, authenticated stream, and memory on both sides for what is large."""

    def __init__(self, sock: socket.socket, peer: str, options: FabricOptions, endpoint: NixlEndpoint) -> None:
        """Take ownership of the socket and the endpoint, which has joined its peer's."""
        self._endpoint = endpoint
        self._notes = _Notes(endpoint, sock)
        super().__init__(sock, peer, options, pool=Pool(endpoint.outgoing, gate=self._notes), announces=True)
        self._arrivals = endpoint.incoming
        self._from_bytes = options.one_sided_from_bytes
        self._in_flight_messages = options.in_flight_messages
        self._announced: StreamFrame | None = None

    def _deliver(self, header: bytes, parts: list[Part], deadline: Deadline) -> None:
        if self._notes.failure is not None:
            raise self._fail(self._notes.failure)
        nbytes = sum(part.nbytes for part in parts)
        if nbytes < self._from_bytes:
            super()._deliver(header, parts, deadline)
            return
        if deadline.timeout_s == 0:
            self._raise_unless_it_fits(nbytes)
        try:
            self._wait_for_credit(deadline)
            staged = stage(self._pool, parts, deadline.left_s(), lambda lease: lease.pool is self._pool)
        except (PeerLost, ProtocolViolation) as error:
            raise self._fail(error) from error
        message_id = self._notes.charge(staged.leases)
        table = pack_places(message_id, [(lease.offset + start, length) for lease, start, length in staged.places])
        head = pack_head(FrameKind.SHARED, header, table, buffers=len(staged.places), payload_bytes=nbytes)
        try:
            self._write([memoryview(head)], deadline)
        except BaseException:
            self._notes.refund(message_id)
            raise
        self._write_there(
            [(lease.offset, lease.nbytes) for lease in staged.leases if lease.nbytes], message_id, deadline
        )

    def _wait_for_credit(self, deadline: Deadline) -> None:
        notes = self._notes
        if notes.in_flight < self._in_flight_messages:
            return
        self._count_send_wait()
        while notes.in_flight >= self._in_flight_messages:
            self._raise_if_unusable()
            if deadline.passed or not notes.wait(notes.ticket(), deadline.left_s()):
                raise SendTimeout(f"the peer released no message within {deadline.timeout_s} s")

    def _write_there(self, spans: list[tuple[int, int]], message_id: int, deadline: Deadline) -> None:
        """Write what was announced. If that fails, the peer waits for something that will not come: hang up."""
        waited = False
        try:
            for _ in zip(self._endpoint.write(spans, _NOTE.pack(_WRITTEN, message_id)), _pauses(), strict=False):
                if not waited:
                    self._count_send_wait()
                    waited = True
                self._raise_if_unusable()
                if has_hung_up(self._sock):
                    raise PeerLost(f"the peer {self._peer} is gone")
                if deadline.passed:
                    raise SendTimeout(
                        f"the peer {self._peer} took no data for {deadline.timeout_s} s; a message is half sent",
                        channel_usable=False,
                    )
        except BaseException as error:
            self._fail(error if isinstance(error, FabricError) else ProtocolViolation("a write was interrupted"))
            self._hang_up()
            raise

    def _read_frame(self, deadline: Deadline) -> StreamFrame:
        frame = self._announced
        if frame is None:
            frame = super()._read_frame(deadline)
            if frame.prefix.kind is not FrameKind.SHARED:
                return frame
            self._announced = frame
            self._heard_s = time.monotonic()
        message_id, places = unpack_places(frame.table, frame.prefix, len(self._arrivals))
        self._wait_until_written(message_id, deadline)
        self._announced = None
        return frame._replace(views=[self._arrivals[offset : offset + nbytes] for offset, nbytes in places])

    def _longest_nap_s(self) -> float | None:
        self._notes.read()
        return _NAP_S if time.monotonic() - self._notes.noted_s < _ATTENTIVE_S else _LONG_NAP_S

    def _wait_until_written(self, message_id: int, deadline: Deadline) -> None:
        lost: Deadline | None = None
        for _ in _pauses():
            if self._notes.take_written(message_id):
                return
            if isinstance(self._failure, ChannelClosed) and not isinstance(self._failure, PeerLost):
                self._raise_if_unusable()
            if lost is None and has_hung_up(self._sock):
                lost = Deadline(_LAST_NOTE_S)
            if lost is not None and lost.passed:
                raise self._lost("is gone in the middle of a message")
            if time.monotonic() - self._heard_s > self._stall_timeout_s:
                raise ProtocolViolation(f"the peer announced a message, then nothing for {self._stall_timeout_s} s")
            if deadline.passed:
                raise RecvTimeout(f"no message within {deadline.timeout_s} s")

    def _releaser(self, frame: StreamFrame) -> Callable[[], None]:
        if frame.prefix.kind is not FrameKind.SHARED:
            return super()._releaser(frame)
        message_id, _ = unpack_places(frame.table, frame.prefix, len(self._arrivals))

        def release() -> None:
            self._count_release()
            self._notes.acknowledge(message_id)

        return release

    def close(self) -> None:
        """Close the stream, then disconnect from the peer's memory."""
        super().close()
        self._endpoint.close()


def connect(address: Address, secret: bytes, options: FabricOptions, deadline: Deadline) -> NixlChannel:
    """Connect, authenticate and exchange descriptions; see `endpoints.connect`."""
    load_nixl()
    sock = dial(address, secret, deadline)
    endpoint = None
    try:
        endpoint = NixlEndpoint(options.pool_bytes, transport=options.nixl_transport)
        description = endpoint.description()
        finish_connect(sock, deadline, lambda: sock.sendall(description))
        head = recv_exactly(sock, DESCRIPTION_HEAD_BYTES, deadline)
        endpoint.join(head + recv_exactly(sock, description_bytes(head), deadline))
        return NixlChannel(sock, str(address), options, endpoint)
    except BaseException:
        if endpoint is not None:
            endpoint.close()
        sock.close()
        raise


def listen(address: Address, secret: bytes, options: FabricOptions) -> SocketListener:
    """Listen; see `endpoints.listen`. Port 0 takes a free port."""
    load_nixl()

    def greet(sock: socket.socket) -> Greeting:
        yield from authenticate(sock, secret, "nixl")
        head = yield from receive(sock, DESCRIPTION_HEAD_BYTES)
        theirs = yield from receive(sock, description_bytes(head))
        endpoint = NixlEndpoint(options.pool_bytes, transport=options.nixl_transport)
        try:
            endpoint.join(head + theirs)
            sock.send(endpoint.description())
            return NixlChannel(sock, peer_of(sock, "nixl"), options, endpoint)
        except BaseException:
            endpoint.close()
            raise

    return listen_with(address, options, greet)
