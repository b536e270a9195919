"""A registered buffer pool: leases of one bounded arena, the same for all channels.

The arena is anonymous memory (inproc, tcp) or a shared segment (shm). `acquire` waits for room, or fails
at once with a timeout of 0. A lease is released exactly once, or handed over by sending it; a second release raises.
Leases that were never released show in `statistics()`.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left
from collections.abc import Iterable
from typing import NoReturn, Protocol, Self

import numpy as np

from plait_fabric.errors import FabricError, LeaseMisuse, PoolExhausted
from plait_fabric.values import PoolStatistics
from plait_fabric.waiting import Deadline, pauses

ALIGNMENT_BYTES = 64
"""The size of a cache line, which is also the alignment that SIMD loads prefer."""
_NO_RESERVE = 0x4000
"""MAP_NORESERVE (asm-generic/mman.h; Python 3.11's `mmap` lacks it): unused address space is not accounted."""
_NUMPY_FROM_BYTES = 16_384
"""The size from which numpy copies: it releases the GIL, which a memoryview assignment does not."""


def copy_bytes(target: memoryview, source: memoryview | bytes | bytearray) -> None:
    """Copy `source` over `target` (equal lengths, both flat bytes)."""
    if len(target) < _NUMPY_FROM_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Map at least so many bytes of this process's own memory, in whole pages, which are allocated on first use."""
    rounded = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return mmap.mmap(-1, rounded, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def align(nbytes: int) -> int:
    """Round up to the alignment of leases, and of buffers within a message."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def size_class(nbytes: int) -> int:
    """Return how many bytes a request of `nbytes` occupies: a multiple of 64, four steps per doubling."""
    if nbytes <= 4 * ALIGNMENT_BYTES:
        return max(ALIGNMENT_BYTES, align(nbytes))
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class Extents:
    """The free list of an arena of `capacity_bytes`: address-ordered first fit with coalescing.

    First fit in address order keeps the low, already mapped and cache-warm pages in use and fragments
    little (Johnstone and Wilson, "The memory fragmentation problem: solved?", ISMM 1998). Sizes are
    rounded up to size classes, four per doubling, so that a freed extent fits the next request of
    nearly the same size; the waste is below 25 %.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes - capacity_bytes % ALIGNMENT_BYTES
        self._starts: list[int] = [0] if self.capacity_bytes else []
        self._ends: list[int] = [self.capacity_bytes] if self.capacity_bytes else []

    def occupied_by(self, nbytes: int) -> int:
        """Return how many bytes `take(nbytes)` would use: its size class, or the exact size when only that can fit."""
        rounded = size_class(nbytes)
        if rounded <= self.capacity_bytes:
            return rounded
        return max(ALIGNMENT_BYTES, align(nbytes))

    def take(self, nbytes: int) -> int | None:
        """Reserve space and return its offset, or None when no free extent is large enough."""
        need = self.occupied_by(nbytes)
        for index, start in enumerate(self._starts):
            if self._ends[index] - start >= need:
                if self._ends[index] - start == need:
                    del self._starts[index], self._ends[index]
                else:
                    self._starts[index] = start + need
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Free what `take(nbytes)` returned, coalescing it with its free neighbours."""
        start, end = offset, offset + self.occupied_by(nbytes)
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index > 0 and self._ends[index - 1] == start:
            self._ends[index - 1] = end
            return
        self._starts.insert(index, start)
        self._ends.insert(index, end)


class Gate(Protocol):
    """How a pool learns what a peer has released."""

    def reap(self) -> None:
        """Collect it. Never raises."""

    def check(self) -> None:
        """Collect it; raise `PeerLost` if there will be no more of it, and whatever else is wrong."""


class Lease:
    """`nbytes` of a pool, writable through `memory` until released or sent."""

    __slots__ = ("live", "memory", "nbytes", "offset", "pool")

    def __init__(self, pool: Pool, offset: int, nbytes: int, memory: memoryview) -> None:
        self.pool = pool
        self.offset = offset
        self.nbytes = nbytes
        self.memory = memory
        self.live = True
        """Whether the holder of this object owns the memory."""

    def write(self, source: memoryview | bytes | bytearray, at: int = 0) -> None:
        """Copy bytes in at offset `at`, and count the copy."""
        if not self.live:
            raise LeaseMisuse("the lease was released or sent; it cannot be written")
        copy_bytes(self.memory[at : at + len(source)], source)
        self.pool.count_copy(len(source))

    def release(self) -> None:
        """Release the memory. Raises `LeaseMisuse` if it no longer belongs to the caller."""
        self.pool.give_back(self)

    def hand_over(self) -> Lease:
        """Move ownership into a new object (as a channel does when it sends the lease)."""
        return self.pool.transfer(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        release_all([self])


class Pool:
    """Leases of one arena. All methods are thread-safe."""

    def __init__(self, arena: memoryview, *, gate: Gate | None = None) -> None:
        """Lease out `arena` (flat, writable). `gate`: of one that a peer reads from."""
        self._arena = arena
        self._extents = Extents(len(arena))
        self._gate = gate
        self._lock = threading.Lock()
        self._leases = self._leased_bytes = self._peak_bytes = 0
        self._waits = self._copies = self._copied_bytes = 0
        self._shut: FabricError | None = None

    @classmethod
    def anonymous(cls, capacity_bytes: int) -> Pool:
        """Create a pool in this process's own memory; pages are allocated on first use."""
        return cls(memoryview(anonymous_memory(capacity_bytes)))

    @property
    def capacity_bytes(self) -> int:
        """Size of the largest possible lease."""
        return self._extents.capacity_bytes

    def can_ever_lease(self, nbytes: int) -> bool:
        """Return whether an empty pool would have room for `nbytes`."""
        return self._extents.occupied_by(nbytes) <= self.capacity_bytes

    def acquire(self, nbytes: int, timeout_s: float | None = None) -> Lease:
        """Lease `nbytes` (0 is allowed), waiting at most `timeout_s` seconds (None: for ever) for memory to be
        released.

        Raises `PoolExhausted` on timeout, and at once when the pool could never have the room;
        `ChannelClosed` or `PeerLost` when the channel that it belongs to ends while waiting.
        """
        lease = self._try(nbytes)
        if lease is not None:
            return lease
        if not self.can_ever_lease(nbytes):
            self._refuse(nbytes, "ever")
        with self._lock:
            self._waits += 1
        deadline, pause = Deadline(timeout_s), pauses()
        while lease is None:
            if deadline.passed:
                self._refuse(nbytes, f"within {timeout_s} s")
            if self._shut is not None:
                raise type(self._shut)(str(self._shut))
            if self._gate is not None:
                self._gate.check()
            next(pause)
            lease = self._try(nbytes)
        return lease

    def shut(self, reason: FabricError) -> None:
        """Disable waiting: from now on, `acquire` raises `reason` where it would have waited."""
        self._shut = reason

    def _try(self, nbytes: int) -> Lease | None:
        if nbytes < 0:
            raise ValueError(f"a lease of {nbytes} bytes makes no sense")
        if self._gate is not None:
            self._gate.reap()  # first, so that warm pages are used again before fresh ones
        with self._lock:
            offset = self._extents.take(nbytes)
            if offset is None:
                return None
            self._leases += 1
            self._leased_bytes += self._extents.occupied_by(nbytes)
            self._peak_bytes = max(self._peak_bytes, self._leased_bytes)
        return Lease(self, offset, nbytes, self._arena[offset : offset + nbytes])

    def _refuse(self, nbytes: int, when: str) -> NoReturn:
        with self._lock:
            held, leases = self._leased_bytes, self._leases
        raise PoolExhausted(
            f"no room for {nbytes} bytes {when}: {leases} leases hold {held} of {self.capacity_bytes} bytes"
        )

    def give_back(self, lease: Lease) -> None:
        """Take a lease back. Raises `LeaseMisuse` the second time or after a hand-over."""
        with self._lock:
            self._end(lease)
            self._extents.give(lease.offset, lease.nbytes)
            self._leases -= 1
            self._leased_bytes -= self._extents.occupied_by(lease.nbytes)

    def transfer(self, lease: Lease) -> Lease:
        """Move a lease into a new object; the old one becomes unusable. Raises `LeaseMisuse`."""
        with self._lock:
            self._end(lease)
        return Lease(self, lease.offset, lease.nbytes, lease.memory)

    def _end(self, lease: Lease) -> None:
        if not lease.live:
            raise LeaseMisuse("the lease was already released or sent")
        lease.live = False

    def count_copy(self, nbytes: int) -> None:
        """Record one payload copy into this pool (the hook behind `ChannelStatistics.copies`)."""
        with self._lock:
            self._copies += 1
            self._copied_bytes += nbytes

    def statistics(self) -> PoolStatistics:
        """Return a consistent snapshot."""
        if self._gate is not None:
            self._gate.reap()
        with self._lock:
            return PoolStatistics(
                capacity_bytes=self.capacity_bytes,
                leased_bytes=self._leased_bytes,
                leases=self._leases,
                peak_leased_bytes=self._peak_bytes,
                waits=self._waits,
                copies=self._copies,
                copied_bytes=self._copied_bytes,
            )


def release_all(buffers: Iterable[object]) -> None:
    """Release every lease among these that still belongs to its holder."""
    for buffer in buffers:
        if isinstance(buffer, Lease) and buffer.live:
            buffer.release()
