"""Shared memory against the least that this machine can do: memcpy for large messages, bare memory for small ones.

Throughput: messages of 1 MiB from a 64 MiB source that no cache holds. The fabric's sender copies each into its
segment, and the receiver, another process, reads every byte (it returns their sum, which is checked). memcpy copies the
same source piece by piece into an equally large buffer, which nobody reads.

Round trips: 64 bytes to another process and back, with both sides spinning and with both asleep, beside the least that
two Python processes can do. Shared memory holds a counter and the bytes, once for each direction. A sender copies its
bytes in and raises its counter, a receiver copies them out: it looks at the counter until it rises (spinning), or
sleeps on an eventfd (blocking). No message has a header, nothing is checked, a peer that dies is never noticed.
Processes are placed by the scheduler: pinned to a core each, sleepers pay for waking an idle core.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from itertools import count

import numpy as np

from plait_bench.benchmark import Reading, Say, Workload, percentile, readings, started
from plait_bench.errors import BenchError
from plait_bench.fabric.peer import WAIT_S, channel_to, drain, echo, on_separate_cores
from plait_fabric import Channel, FabricOptions
from plait_fabric.memory.pool import copy_bytes

MESSAGE_BYTES, SOURCE_BYTES = 1 << 20, 64 << 20
_PASSES = 12

_BYTES, _REPEATS, _WARM_UP = 64, 10_000, 500
_PAGE = mmap.PAGESIZE
_SPIN_S: Mapping[str, float] = {"spinning": 0.2, "blocking": 0.0}
"""How long each system spins: "spinning" spins for longer than any answer takes, so that neither side ever sleeps."""
_BARE: Mapping[str, str] = {f"bare_{name}": name for name in _SPIN_S}


class Throughput(Workload):
    """The throughput of all passes over the source."""

    name = "shm-1mib"
    systems = ("plait", "memcpy")
    metrics: Mapping[str, str] = {"gb_per_s": "GB/s"}

    def prepare(self, say: Say) -> None:
        """Allocate the source, and as much memory again."""
        source = np.random.default_rng(1).integers(0, 2**63, SOURCE_BYTES // 8, dtype=np.uint64)
        view = memoryview(source.data).cast("B")
        self._checksum = int(source.sum(dtype=np.uint64))
        self._pieces = [view[start : start + MESSAGE_BYTES] for start in range(0, SOURCE_BYTES, MESSAGE_BYTES)]
        self._target = memoryview(bytearray(SOURCE_BYTES))

    def take(self, system: str, number: int) -> list[Reading]:
        """Time all passes, after one that touches the pages; with a remark on the cores that were used."""
        if system == "memcpy":
            return self._timed(self._copy)
        with channel_to(drain) as (channel, pid), on_separate_cores(pid) as layout:
            return self._timed(lambda passes: self._send(channel, passes), layout)

    def _timed(self, run: Callable[[int], None], layout: str = "") -> list[Reading]:
        run(1)
        started_s = time.perf_counter()
        run(_PASSES)
        seconds = time.perf_counter() - started_s
        return readings({"gb_per_s": _PASSES * SOURCE_BYTES / seconds / 1e9}, layout=layout)

    def _copy(self, passes: int) -> None:
        for _ in range(passes):
            for place, piece in enumerate(self._pieces):
                copy_bytes(self._target[place * MESSAGE_BYTES : (place + 1) * MESSAGE_BYTES], piece)

    def _send(self, channel: Channel, passes: int) -> None:
        for _ in range(passes):
            for piece in self._pieces:
                channel.send({}, [piece])
        channel.send({"end": True})
        with channel.recv(WAIT_S) as answer:
            if answer.header != {"bytes": passes * SOURCE_BYTES, "sum": passes * self._checksum % 2**64}:
                raise BenchError("the receiver did not read what was sent")


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
