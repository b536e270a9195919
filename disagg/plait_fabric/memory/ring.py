"""A ring of packets in shared memory: one process writes, another reads, and neither calls the kernel.

It is at the beginning of the writer's segment: a page of control words, each on a cache line of its own, then the
packets. A packet is its length (u64) and its bytes, padded to words; one that would not fit before the end of the
ring leaves a mark there and starts over. `written` and `taken` count bytes since the beginning and never decrease.
Behind the control words are those by which the reader tells that it has released a message (`transport/shm.py`).

The reader sets `sleeping` before it waits for the kernel to wake it, and checks once more; the writer publishes its
packet and then checks `sleeping`. One of the two sees the other (Dekker 1965), provided that a store is not
overtaken by the load after it: `_Fence`.
"""

from __future__ import annotations

import mmap
import platform
import threading
from collections.abc import Sequence

from plait_fabric.errors import ProtocolViolation

_PAGE = mmap.PAGESIZE
_WRITTEN, _TAKEN, _SLEEPING, _GOODBYE, _SIZE = 0, 8, 16, 24, 32
"""The positions of the control words, in 8-byte words: 8 of them fill a cache line."""
_RELEASED = 256
"""The position of the first word of those that tell of releases."""
MAX_RELEASES = 256
_START_OVER = 2**64 - 1
_MIN_BYTES = 1 << 18

_IS_STRONG = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether the architecture makes stores visible in program order without a fence."""


class _Fence:
    """A memory fence: no load or store of ours moves past it, because taking a lock is an atomic operation.

    Where loads and stores move freely, a second lock operation orders what came before the first release. Each end
    has a lock of its own, for which nothing ever waits.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self) -> None:
        with self.lock:
            pass
        if not _IS_STRONG:
            with self.lock:
                pass


def ring_bytes(max_packet: int) -> int:
    """Return the size in bytes of a ring for packets of that size, in whole pages."""
    return _PAGE + max(_MIN_BYTES, -(-2 * (max_packet + 8) // _PAGE) * _PAGE)


class RingWriter:
    """The writing end. One thread at a time."""

    def __init__(self, memory: memoryview) -> None:
        """Create an empty ring over all of `memory`, whose size is that of `ring_bytes`."""
        self._words = memory[:_PAGE].cast("Q")
        self._data = memory[_PAGE:]
        self._lengths = self._data.cast("Q")
        self._size = len(self._data)
        self._written = 0
        self._fence = _Fence()
        self._words[_SIZE] = self._size

    def put(self, head: bytes, payload: Sequence[memoryview] = ()) -> bool:
        """Add a packet made of the head and the flat bytes of the payload; return False if there is no room now."""
        nbytes = len(head)
        for piece in payload:
            nbytes += len(piece)
        written = self._written
        at = written % self._size
        need = 8 + (nbytes + 7 & -8)
        if at + need > self._size:
            if written + self._size - at + need - self._words[_TAKEN] > self._size:
                return False
            self._lengths[at >> 3] = _START_OVER
            written += self._size - at
            at = 0
        elif written + need - self._words[_TAKEN] > self._size:
            return False
        self._lengths[at >> 3] = nbytes
        at += 8
        self._data[at : at + len(head)] = head
        at += len(head)
        for piece in payload:
            self._data[at : at + len(piece)] = piece
            at += len(piece)
        if not _IS_STRONG:
            self._fence()
        self._written = self._words[_WRITTEN] = written + need
        return True

    def must_wake(self) -> bool:
        """Return whether the reader is sleeping, True only once for each sleep. Call after `put`."""
        with self._fence.lock:  # for a strong machine all that a fence is, without the call
            pass
        if not _IS_STRONG:
            self._fence()
        if not self._words[_SLEEPING]:
            return False
        self._words[_SLEEPING] = 0
        return True

    def expect_release(self, number: int) -> None:
        """Prepare the word of a message, below `MAX_RELEASES`, that is about to be put."""
        self._words[_RELEASED + number] = 0

    def is_released(self, number: int) -> bool:
        """Return whether the reader has released that message: what it read may be written to."""
        if not self._words[_RELEASED + number]:
            return False
        if not _IS_STRONG:
            self._fence()
        return True

    def say_goodbye(self) -> None:
        """Mark the ring as closed cleanly. Callable from any thread."""
        self._words[_GOODBYE] = 1


class RingReader:
    """The reading end. One thread at a time. Trusts nothing that it reads: raises `ProtocolViolation`."""

    def __init__(self, memory: memoryview) -> None:
        """Attach to the peer's ring at the start of `memory`; `nbytes` of it are the ring's."""
        if len(memory) < _PAGE:
            raise ProtocolViolation("the peer's segment has no ring")
        self._words = memory[:_PAGE].cast("Q")
        size = self._words[_SIZE]
        if not 0 < size <= len(memory) - _PAGE or size % 8:
            raise ProtocolViolation("the peer's segment has no ring")
        self.nbytes = _PAGE + size
        self._data = memory[_PAGE : self.nbytes]
        self._lengths = self._data.cast("Q")
        self._size = size
        self._taken = 0
        self._fence = _Fence()

    def ready(self) -> bool:
        """Return whether there is a packet."""
        return self._words[_WRITTEN] != self._taken

    def take(self) -> bytes | None:
        """Return the next packet, copied out, or None if there is none."""
        taken = self._taken
        there = self._words[_WRITTEN] - taken
        if not there:
            return None
        if not _IS_STRONG:
            self._fence()
        at = taken % self._size
        nbytes = self._lengths[at >> 3]
        if nbytes == _START_OVER:
            taken += self._size - at
            there -= self._size - at
            at = 0
            nbytes = self._lengths[0]
        need = 8 + (nbytes + 7 & -8)
        if not need <= there <= self._size or at + need > self._size:
            raise ProtocolViolation("the peer's ring makes no sense")
        packet = bytes(self._data[at + 8 : at + 8 + nbytes])
        self._taken = self._words[_TAKEN] = taken + need
        return packet

    def sleeps(self, asleep: bool) -> None:
        """Announce that this end is about to wait for a wake-up, or is awake again. Check for a packet in between."""
        self._words[_SLEEPING] = asleep
        self._fence()

    def release(self, number: int) -> None:
        """Tell the writer that a message is released. Callable from any thread."""
        if not _IS_STRONG:
            self._fence()
        self._words[_RELEASED + number] = 1

    def said_goodbye(self) -> bool:
        """Return whether the peer closed cleanly."""
        return bool(self._words[_GOODBYE])
