"""Round-trip time of 64 bytes to another process over shared memory, with both sides spinning and with both asleep.

Beside each stands the least that two Python processes can do. Shared memory holds a counter and the bytes, once for
each direction. A sender copies its bytes in and raises its counter, a receiver copies them out: it looks at the counter
until it rises (spinning), or sleeps on an eventfd (blocking). No message has a header, nothing is checked, a peer that
dies is never noticed. Processes are placed by the scheduler: pinned to a core each, sleepers pay for waking an idle
core.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from itertools import count

from plait_bench.benchmark import Reading, Workload, percentile, readings, started
from plait_bench.fabric.peer import WAIT_S, channel_to, echo
from plait_fabric import Channel, FabricOptions

_BYTES, _REPEATS, _WARM_UP = 64, 10_000, 500
_PAGE = mmap.PAGESIZE
_SPIN_S: Mapping[str, float] = {"spinning": 0.2, "blocking": 0.0}
"""How long each system spins: "spinning" spins for longer than any answer takes, so that neither side ever sleeps."""
_BARE: Mapping[str, str] = {f"bare_{name}": name for name in _SPIN_S}


class RoundTrips(Workload):
    """The median round trip of a run of messages."""

    name = "round-trip-64b"
    systems = (*_SPIN_S, *_BARE)
    pairs = tuple((name, bare) for bare, name in _BARE.items())
    metrics: Mapping[str, str] = {"round_trip_us": "us"}

    def take(self, system: str, number: int) -> list[Reading]:
        """Time messages over a new channel, or to a bare peer. Whatever starts with the peer belongs to the warm-up."""
        if system in _SPIN_S:
            with channel_to(echo, options=FabricOptions(spin_s=_SPIN_S[system])) as (channel, _):
                times_us = round_trips_us(channel, _WARM_UP + _REPEATS)
        else:
            times_us = bare_round_trips_us(_WARM_UP + _REPEATS, spins=_SPIN_S[_BARE[system]] > 0)
        return readings({"round_trip_us": percentile(times_us[_WARM_UP:], 0.5)})


def round_trips_us(channel: Channel, repeats: int) -> list[float]:
    """Time `repeats` messages with one buffer over a channel whose peer echoes: send, receive, release."""
    payload = memoryview(os.urandom(_BYTES))
    times_us: list[float] = []
    for _ in range(repeats):
        began_ns = time.perf_counter_ns()
        channel.send({"n": 0}, [payload])
        channel.recv(WAIT_S).release()
        times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
    return times_us


def bare_round_trips_us(repeats: int, *, spins: bool) -> list[float]:
    """Time `repeats` round trips to a child of this process."""
    descriptors = os.memfd_create("bare"), os.eventfd(0), os.eventfd(0)
    os.ftruncate(descriptors[0], 2 * _PAGE)
    payload, times_us = os.urandom(_BYTES), []
    try:
        with started(_send_back, *descriptors, spins, pass_fds=descriptors):
            put, take = _ends(*descriptors, spins=spins, is_child=False)
            for number in range(1, repeats + 1):
                began_ns = time.perf_counter_ns()
                put(number, payload)
                take(number)
                times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return times_us


def _ends(
    memory: int, there: int, back: int, *, spins: bool, is_child: bool
) -> tuple[Callable[[int, bytes], None], Callable[[int], bytes]]:
    """Return what sends message `number` (from 1), and what waits for one and returns its bytes."""
    both = memoryview(mmap.mmap(memory, 2 * _PAGE))
    pages = both[:_PAGE], both[_PAGE:]
    mine, theirs = reversed(pages) if is_child else pages
    ring, bell = (back, there) if is_child else (there, back)
    mine_count, theirs_count = mine[:8].cast("Q"), theirs[:8].cast("Q")
    mine_bytes, theirs_bytes = mine[64 : 64 + _BYTES], theirs[64 : 64 + _BYTES]

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


def _send_back(memory: int, there: int, back: int, spins: bool) -> None:
    """Send every message back, until killed."""
    put, take = _ends(memory, there, back, spins=spins, is_child=True)
    for number in count(1):
        put(number, take(number))
