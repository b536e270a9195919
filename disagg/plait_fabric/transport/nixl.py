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
import time
from collections.abc import Callable, Sequence

from plait_fabric.errors import ChannelClosed, FabricError, PeerLost, ProtocolViolation, RecvTimeout, SendTimeout
from plait_fabric.memory.pool import Lease, Pool, release_all
from plait_fabric.protocols import Channel
from plait_fabric.transport.acceptor import Listener
from plait_fabric.transport.base import Credit, Part
from plait_fabric.transport.frames import FrameKind, StreamFrame, unpack_places
from plait_fabric.transport.greeting import receive
from plait_fabric.transport.nixl_endpoint import DESCRIPTION_HEAD_BYTES, NixlEndpoint, description_bytes, load_nixl
from plait_fabric.transport.tcp import TcpChannel, dial, listen_with, welcome
from plait_fabric.values import Address, FabricOptions
from plait_fabric.waiting import Deadline, has_hung_up, pauses

_NOTE = struct.Struct("!cQ")
_WRITTEN, _RELEASED = b"w", b"r"
_MAX_WRITTEN = 1_024
_ATTENTIVE_S, _NAP_S, _LONG_NAP_S = 1.0, 1e-3, 0.05
"""How often a receiver that waits for a message lets the library work: a note that could not leave at once, because the
peers have just met, leaves only then. Often for so long after the last note, else rarely."""
_LAST_NOTE_S = 0.2
"""How long a note may be in flight from a peer that has hung up meanwhile."""


class _Notes(Credit):
    """Both ends of the notes: also which messages have been written here."""

    def __init__(
        self,
        endpoint: NixlEndpoint,
        sock: socket.socket,
        in_flight_messages: int,
        fail: Callable[[FabricError], FabricError],
    ) -> None:
        super().__init__(in_flight_messages, sock, lambda: fail(PeerLost("the peer is gone")))
        self._endpoint = endpoint
        self._fail = fail
        self._last_id = 0
        self._written: set[int] = set()
        self.noted_s = time.monotonic()

    def charge(self, leases: Sequence[Lease]) -> int:
        """Count the messages."""
        self._last_id += 1
        self._outstanding[self._last_id] = leases
        return self._last_id

    def acknowledge(self, message_id: int) -> None:
        """Tell the peer that its message was released."""
        self.noted_s = time.monotonic()
        self._endpoint.tell(_NOTE.pack(_RELEASED, message_id))

    def take_written(self, message_id: int) -> bool:
        """Return whether the message is here, once."""
        self.read()
        if message_id not in self._written:
            return False
        self._written.remove(message_id)
        return True

    def read(self) -> None:
        """Make progress and take the notes that have come. Raises `ProtocolViolation`."""
        for note in self._endpoint.poll():
            if len(note) != _NOTE.size:
                raise self._fail(ProtocolViolation("the peer sent a malformed note"))
            kind, message_id = _NOTE.unpack(note)
            if kind == _WRITTEN and len(self._written) < _MAX_WRITTEN:
                self._written.add(message_id)
                continue
            leases = self._outstanding.pop(message_id, None) if kind == _RELEASED else None
            if leases is None:
                raise self._fail(ProtocolViolation("the peer sent a note of a message that is not its"))
            release_all(leases)

    def let_go(self) -> None:
        """Forget the channel here, too."""
        super().let_go()
        self._fail = lambda failure: failure


class NixlChannel(TcpChannel):
    """One connected, authenticated stream, and memory on both sides for what is large."""

    def __init__(self, sock: socket.socket, peer: str, options: FabricOptions, endpoint: NixlEndpoint) -> None:
        """Take ownership of the socket and the endpoint, which has joined its peer's."""
        self._endpoint = endpoint
        self._notes = _Notes(endpoint, sock, options.in_flight_messages, self._fail)
        super().__init__(sock, peer, options, pool=Pool(endpoint.outgoing, gate=self._notes), announces=True)
        self._arrivals = memoryview(endpoint.incoming)
        self._from_bytes = options.one_sided_from_bytes
        self._announced: StreamFrame | None = None

    def _deliver(self, header: bytes, parts: list[Part], deadline: Deadline) -> None:
        nbytes = sum(part.nbytes for part in parts)
        if nbytes < self._from_bytes:
            super()._deliver(header, parts, deadline)
            return
        if deadline.timeout_s == 0:
            self._raise_unless_it_fits(nbytes)
        number, leases = self._send_placed(
            self._notes, header, parts, deadline, lambda head: self._write([memoryview(head)], deadline)
        )
        self._write_there([(lease.offset, lease.nbytes) for lease in leases if lease.nbytes], number, deadline)

    def _write_there(self, spans: list[tuple[int, int]], message_id: int, deadline: Deadline) -> None:
        """Write what was announced. If that fails, the peer waits for something that will not come: hang up."""
        try:
            for step, _ in enumerate(
                zip(self._endpoint.write(spans, _NOTE.pack(_WRITTEN, message_id)), pauses(), strict=False)
            ):
                if not step:
                    self._counted.send_waits += 1
                self._raise_if_unusable()
                if has_hung_up(self._sock):
                    raise PeerLost(f"the peer {self.peer} is gone")
                if deadline.passed:
                    raise SendTimeout(
                        f"the peer {self.peer} took no data for {deadline.timeout_s} s; a message is half sent",
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
        for _ in pauses():
            if self._notes.take_written(message_id):
                return
            if isinstance(self._failure, ChannelClosed):
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
        self._notes.let_go()


def connect(address: Address, secret: bytes, options: FabricOptions, deadline: Deadline) -> Channel:
    """Connect, authenticate and exchange descriptions; see `endpoints.connect`."""
    load_nixl()
    sock = dial(address, secret, deadline)
    try:
        return _exchange(sock, str(address), options, deadline)
    except BaseException:
        sock.close()
        raise


def listen(address: Address, secret: bytes, options: FabricOptions) -> Listener:
    """Listen; see `endpoints.listen`. Port 0 takes a free port."""
    load_nixl()

    def greet(sock: socket.socket, deadline: Deadline) -> Channel:
        return _exchange(sock, welcome(sock, secret, "nixl", deadline), options, deadline)

    return listen_with(address, options, greet)


def _exchange(sock: socket.socket, peer: str, options: FabricOptions, deadline: Deadline) -> Channel:
    """Tell each other of the memory, at both ends alike."""
    endpoint = NixlEndpoint(options.pool_bytes, transport=options.nixl_transport)
    try:
        sock.send(endpoint.description())
        head = receive(sock, DESCRIPTION_HEAD_BYTES, deadline)
        endpoint.join(head + receive(sock, description_bytes(head), deadline))
        return NixlChannel(sock, peer, options, endpoint)
    except BaseException:
        endpoint.close()
        raise
