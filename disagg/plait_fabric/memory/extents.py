"""Free list of an arena: address-ordered first fit with coalescing. Pure; not thread-safe.

First fit in address order keeps the low, already mapped and cache-warm pages in use and fragments
little (Johnstone and Wilson, "The memory fragmentation problem: solved?", ISMM 1998). Sizes are
rounded up to size classes, four per doubling, so that a freed extent fits the next request of
nearly the same size; the waste is below 25 %.
"""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT_BYTES = 64
"""The size of a cache line, which is also the alignment that SIMD loads prefer."""


def size_class(nbytes: int) -> int:
    """Return how many bytes a request of `nbytes` occupies: a multiple of 64, four steps per doubling."""
    if nbytes <= 4 * ALIGNMENT_BYTES:
        return max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class Extents:
    """The free list of an arena of `capacity_bytes`."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes - capacity_bytes % ALIGNMENT_BYTES
        self._starts: list[int] = [0] if self.capacity_bytes else []
        self._ends: list[int] = [self.capacity_bytes] if self.capacity_bytes else []

    def occupied_by(self, nbytes: int) -> int:
        """Return how many bytes `take(nbytes)` would use: its size class, or the exact size when only that can fit."""
        rounded = size_class(nbytes)
        if rounded <= self.capacity_bytes:
            return rounded
        return max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES

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
