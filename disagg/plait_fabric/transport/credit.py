"""What was sent and is not released yet."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from plait_fabric.errors import FabricError, PeerLost
from plait_fabric.memory.pool import Lease, release_all
from plait_fabric.memory.ring import MAX_RELEASES, RingWriter
from plait_fabric.waiting import has_hung_up


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
