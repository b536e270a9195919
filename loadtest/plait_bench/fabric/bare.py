"""The least that two Python processes can do to pass 64 bytes back and forth: what round trips are judged by.

Shared memory holds a counter and the bytes, once for each direction. A sender copies its bytes in and raises its
counter, a receiver copies them out: it looks at the counter until it rises (spinning), or sleeps on an eventfd
(blocking). No message has a header, nothing is checked, a peer that dies is never noticed.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable

__all__ = ["bare_round_trips_us", "main"]

_PAGE = mmap.PAGESIZE
_CHILD = f"import sys; from {__name__} import main; main(*sys.argv[1:])"


def bare_round_trips_us(nbytes: int, repeats: int, *, spins: bool) -> list[float]:
    """Time `repeats` round trips to a child of this process."""
    descriptors = os.memfd_create("bare"), os.eventfd(0), os.eventfd(0)
    os.ftruncate(descriptors[0], 2 * _PAGE)
    command = [sys.executable, "-c", _CHILD, *map(str, descriptors), str(nbytes), str(int(spins))]
    payload, times_us = os.urandom(nbytes), []
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=descriptors) as child:
        try:
            put, take = _ends(descriptors[0], descriptors[1], descriptors[2], nbytes, spins=spins, is_child=False)
            for number in range(1, repeats + 1):
                began_ns = time.perf_counter_ns()
                put(number, payload)
                take(number)
                times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        finally:
            child.kill()
            for descriptor in descriptors:
                os.close(descriptor)
    return times_us


def _ends(
    memory: int, there: int, back: int, nbytes: int, *, spins: bool, is_child: bool
) -> tuple[Callable[[int, bytes], None], Callable[[int], bytes]]:
    """Return what sends message `number` (from 1), and what waits for one and returns its bytes."""
    both = memoryview(mmap.mmap(memory, 2 * _PAGE))
    pages = both[:_PAGE], both[_PAGE:]
    mine, theirs = reversed(pages) if is_child else pages
    ring, bell = (back, there) if is_child else (there, back)
    mine_count, mine_bytes, theirs_count, theirs_bytes = (
        mine[:8].cast("Q"), mine[64 : 64 + nbytes], theirs[:8].cast("Q"), theirs[64 : 64 + nbytes],
    )  # fmt: skip

    def put(number: int, payload: bytes) -> None:
        mine_bytes[:] = payload
        mine_count[0] = number
        if not spins:
            os.eventfd_write(ring, 1)

    def take(number: int) -> bytes:
        if not spins:
            os.eventfd_read(bell)
        while theirs_count[0] != number:
            pass
        return bytes(theirs_bytes)

    return put, take


def main(memory: str, there: str, back: str, nbytes: str, spins: str) -> None:
    """Send every message back, until killed."""
    put, take = _ends(int(memory), int(there), int(back), int(nbytes), spins=spins == "1", is_child=True)
    number = 0
    while True:
        number += 1
        put(number, take(number))
