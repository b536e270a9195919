"""What was sent and is not released yet; and the return path of an shm channel, by which releases are told.

A second socket pair carries only message ids (u64; 0 is a clean close), so the sending thread
reads it while the receiving thread reads the data socket, and neither waits for the other. There
is at most one unread packet per message in flight, so an acknowledgement never blocks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from plait_fabric.errors import FabricError, PeerClosed, PeerLost, ProtocolViolation
from plait_fabric.memory.pool import Lease, release_all
from plait_fabric.transport.waiting import GONE, POLL_IN, Deadline, Waiter

_GOODBYE = 0
_ID = struct.Struct("!Q")


class Credit(ABC):
    """The leases of messages that the peer has not released yet, by the numbers of the messages; also the `Gate` of the
    pool that they are of. Subclasses learn what was released."""

    def __init__(self, in_flight_messages: int, fail: Callable[[FabricError], FabricError]) -> None:
        """`fail` is called with the reason why the channel ended, until `let_go`."""
        self._in_flight_messages = in_flight_messages
        self._fail = fail
        self._outstanding: dict[int, Sequence[Lease]] = {}
        self._last_id = self._openings = 0

    @property
    def spent(self) -> bool:
        """Whether no further message may be sent, as far as is known."""
        return len(self._outstanding) >= self._in_flight_messages

    def charge(self, leases: Sequence[Lease]) -> int:
        """Record a message that is about to be sent; return its number."""
        self._last_id += 1
        self._outstanding[self._last_id] = leases
        return self._last_id

    def refund(self, message_id: int) -> None:
        """Give back the leases of a message that could not be sent."""
        release_all(self._outstanding.pop(message_id))

    def let_go(self) -> None:
        """Forget the channel, lest a cycle keep its memory: `fail` refers to it, a lease to its pool. The leases are
        not given back: the peer may still read them."""
        self._fail = lambda failure: failure
        self._outstanding.clear()

    def ticket(self) -> int:
        """Return the number of openings so far."""
        return self._openings

    def open(self) -> None:
        """Record that memory was released on this side."""
        self._openings += 1

    @abstractmethod
    def wait(self, ticket: int, timeout_s: float | None) -> bool:
        """Wait for a release after `ticket`; return False on timeout. Raises `PeerLost`, `ProtocolViolation`."""

    @abstractmethod
    def reap(self) -> None:
        """Learn what was released, without waiting."""


class CreditLine(Credit):
    """Both ends of the return path: `acknowledge` is for what we received."""

    def __init__(
        self, sock: socket.socket, in_flight_messages: int, fail: Callable[[FabricError], FabricError]
    ) -> None:
        """Own `sock` (seqpacket, non-blocking)."""
        super().__init__(in_flight_messages, fail)
        self._sock = sock
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiter = Waiter(sock.fileno(), self._wake, events=POLL_IN)
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._sleeping = self._closed = False

    def acknowledge(self, message_id: int) -> None:
        """Notify the peer that its message was released. A lost peer is ignored."""
        with self._writing:
            if not self._closed:
                self._send(message_id)

    def _send(self, message_id: int) -> None:
        try:
            self._sock.send(_ID.pack(message_id))
        except BlockingIOError:
            self._fail(ProtocolViolation("the peer leaves its acknowledgements unread"))
        except OSError:
            return

    def open(self) -> None:
        """Wake the sending thread, too."""
        super().open()
        if self._sleeping:
            with self._writing:
                if not self._closed:
                    os.eventfd_write(self._wake, 1)

    def reap(self) -> None:
        """Read the acknowledgements that have arrived, without waiting."""
        if self._reading.acquire(blocking=False):
            try:
                self._read()
            except FabricError:
                return
            finally:
                self._reading.release()

    def wait(self, ticket: int, timeout_s: float | None) -> bool:
        """Wait for an acknowledgement or a release after `ticket`. Raises `PeerLost` at once when the peer is lost."""
        deadline = Deadline(timeout_s)
        if not self._reading.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        try:
            self._read()
            while self._openings == ticket:
                self._sleeping = True
                if self._openings == ticket and not self._waiter.wait(deadline.left_s()):
                    return False
                self._sleeping = False
                self._read()
        finally:
            self._sleeping = False
            self._reading.release()
        return True

    def _read(self) -> None:
        """Read every acknowledgement that has arrived. Call with `_reading` held."""
        if self._closed:
            return
        while True:
            try:
                packet = self._sock.recv(_ID.size + 1)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue
            if not packet:
                raise self._fail(PeerLost(f"the peer {GONE}"))
            self._take(packet)
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def _take(self, packet: bytes) -> None:
        if len(packet) != _ID.size:
            raise self._fail(ProtocolViolation("the peer sent a malformed acknowledgement"))
        (message_id,) = _ID.unpack(packet)
        if message_id == _GOODBYE:
            raise self._fail(PeerClosed("the peer closed the channel"))
        leases = self._outstanding.pop(message_id, None)
        if leases is None:
            raise self._fail(ProtocolViolation("the peer acknowledged a message that is not its"))
        release_all(leases)
        self._openings += 1

    def hang_up(self, *, goodbye: bool) -> None:
        """End both directions and wake all waiters; the descriptors stay open until `close`."""
        with self._writing:
            if self._closed:
                return
            if goodbye:
                self._send(_GOODBYE)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._openings += 1
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the descriptors once nothing waits on them. Call after `hang_up`."""
        with self._reading, self._writing:
            if not self._closed:
                self._closed = True
                self._sock.close()
                os.close(self._wake)
                self.let_go()
