"""The fabric: throughput of shared memory, round-trip times of small and large messages, and whether a modelled link
keeps its own time.

Rows of kind `modelled` hold what a link's model computes; rows of kind `measured` were measured on this machine,
even where what was measured is a modelled channel: they show how well real time follows the model.

Shared memory is compared with the least that this machine can do: memcpy for large messages, bare memory for small
ones. The peer of the others sends a lease of the same size back (`bounce`), and so does this side, so that only the way
is timed.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from plait_bench.benchmark import Reading, Say, Workload, percentile, readings, selected, started
from plait_bench.errors import BenchError, SystemUnavailable
from plait_bench.fabric.peer import WAIT_S, bounce, channel_to, drain, echo, on_separate_cores, ping_pong
from plait_fabric import Channel, FabricOptions, Unsupported
from plait_fabric.link.link import Link
from plait_fabric.link.link_files import LINKS, read_links
from plait_fabric.memory.pool import copy_bytes
from plait_fabric.transport.nixl_endpoint import load_nixl

MESSAGE_BYTES, SOURCE_BYTES = 1 << 20, 64 << 20
_PASSES = 12

_BYTES, _REPEATS, _WARM_UP_TRIPS = 64, 10_000, 500
_PAGE = mmap.PAGESIZE
_SPIN_S: Mapping[str, float] = {"spinning": 0.2, "blocking": 0.0}
"""How long each system spins: "spinning" spins for longer than any answer takes, so that neither side ever sleeps."""
_BARE: Mapping[str, str] = {f"bare_{name}": name for name in _SPIN_S}

MESSAGES_BYTES = {"64KiB": 1 << 16, "256KiB": 1 << 18, "1MiB": 1 << 20, "13MB": 13_312_000}
"""13 MB: what crosses for a thousand candidates of MLPerf's DLRM-DCNv2 in float32, 13,312 bytes each."""
_MESSAGE_S, _MIN_TRIPS, _WARM_UP = 0.5, 15, 5
_NIXL: Mapping[str, str] = {"nixl": "", "nixl_tcp": "tcp"}
_RDMA = Path("/sys/class/infiniband")

LEASES_BYTES = {"64B": 64, "1MiB": 1 << 20, "4MiB": 1 << 22, "16MiB": 1 << 24, "64MiB": 1 << 26}
FAR = "10g-far"
"""A link that does not ship: 10 Gb/s and 1 ms away, so that it exceeds the overhead of a host at all sizes."""
_LINKS = ("100g-same-switch", "100g-cross-pod", FAR)
_LEASE_S, _MIN_LEASES, _MAX_LEASES = 0.4, 11, 400


class Throughput(Workload):
    """The throughput of all passes over the source: messages of 1 MiB from 64 MiB that no cache holds.

    The fabric's sender copies each into its segment, and the receiver, another process, reads every byte (it returns
    their sum, which is checked). memcpy copies the same source piece by piece into an equally large buffer, which
    nobody reads.
    """

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
    """The median round trip of a run of messages: 64 bytes to another process and back, with both sides spinning and
    with both asleep, beside the least that two Python processes can do.

    Shared memory then holds a counter and the bytes, once for each direction. A sender copies its bytes in and raises
    its counter, a receiver copies them out: it looks at the counter until it rises (spinning), or sleeps on an eventfd
    (blocking). No message has a header, nothing is checked, a peer that dies is never noticed. Processes are placed by
    the scheduler: pinned to a core each, sleepers pay for waking an idle core.
    """

    name = "round-trip-64b"
    systems = (*_SPIN_S, *_BARE)
    pairs = tuple((name, bare) for bare, name in _BARE.items())
    metrics: Mapping[str, str] = {"round_trip_us": "us"}

    def take(self, system: str, number: int) -> list[Reading]:
        """Time messages over a new channel, or to a bare peer. Whatever starts with the peer belongs to the warm-up."""
        if system in _SPIN_S:
            with channel_to(echo, options=FabricOptions(spin_s=_SPIN_S[system])) as (channel, _):
                times_us = round_trips_us(channel, _WARM_UP_TRIPS + _REPEATS)
        else:
            times_us = bare_round_trips_us(_WARM_UP_TRIPS + _REPEATS, spins=_SPIN_S[_BARE[system]] > 0)
        return readings({"round_trip_us": percentile(times_us[_WARM_UP_TRIPS:], 0.5)})


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


class Transports(Workload):
    """The median time there and back of each size, by transport.

    `tcp` is plait's channel over a TCP socket, which copies nothing of its own. `nixl` uses what UCX finds, which the
    row says: RDMA if there is a device, else copies between address spaces; `nixl_tcp` may use TCP alone. Where NIXL is
    not installed, the two are left out with the reason.
    """

    name = "large-messages"
    systems = ("tcp", "shm", *_NIXL)
    metrics: Mapping[str, str] = {"there_and_back_us": "us"}

    def layouts(self, system: str) -> Sequence[str]:
        """Return what carries a message. Raises `SystemUnavailable` without NIXL."""
        if not system.startswith("nixl"):
            return (system,)
        try:
            load_nixl()
        except Unsupported as error:
            raise SystemUnavailable(str(error)) from error
        if _NIXL[system]:
            return (f"UCX over {_NIXL[system]}",)
        device = "an RDMA device" if _RDMA.is_dir() and any(_RDMA.iterdir()) else "no RDMA device"
        return (f"UCX_TLS={os.environ.get('UCX_TLS', 'all')}, {device}",)

    def take(self, system: str, number: int) -> list[Reading]:
        """Open a channel, and time all sizes."""
        options = FabricOptions(one_sided_from_bytes=1, nixl_transport=_NIXL.get(system, ""))
        found: list[Reading] = []
        with channel_to(bounce, system.partition("_")[0], options=options) as (channel, _):
            for size, nbytes in MESSAGES_BYTES.items():
                taken_s, _ = ping_pong(channel, nbytes, seconds=_MESSAGE_S, least=_WARM_UP + _MIN_TRIPS)
                median_us = percentile(taken_s[_WARM_UP:], 0.5) * 1e6
                found += readings({"there_and_back_us": median_us}, workload=f"{self.name}-{size}")
        return found


class ModelledLinks(Workload):
    """Ping-pongs over every link in real time, against its formula: the median of a run of each size, and the model's
    prediction.

    Runs over shared memory with leases, whose cost to the host is the same at all sizes. Half a round trip should be
    the modelled one-way time wherever that exceeds what the host needs; where it does not, the messages report that the
    host is slower, and so does the row.
    """

    name = "modelled-links"
    systems = ("plait", "model")
    metrics: Mapping[str, str] = {"one_way_us": "us"}

    def take(self, system: str, number: int) -> list[Reading]:
        """Measure all links, or compute them."""
        links = known_links()
        one = _modelled if system == "model" else _measured
        return [reading for name in _LINKS for reading in one(name, links[name])]


def known_links() -> dict[str, Link]:
    """Read the links that ship, and add `FAR`."""
    links = {name: sourced.link for name, sourced in read_links(LINKS).items()}
    near = links["100g-same-switch"]
    far = replace(near, name=FAR, alpha_s=1e-3, wire_s=1e-3, bytes_per_s=1.22e9, small_s_per_byte=1 / 1.22e9)
    return links | {FAR: far}


def _modelled(name: str, link: Link) -> list[Reading]:
    """Return the values of the link's formula."""
    return [
        Reading(workload=f"{name}-{size}", metric="one_way_us", value=link.one_way_s(nbytes) * 1e6, kind="modelled")
        for size, nbytes in LEASES_BYTES.items()
    ]


def _measured(name: str, link: Link) -> list[Reading]:
    """Measure a channel over the link."""
    found: list[Reading] = []
    with channel_to(bounce, link=link) as (channel, _):
        for size, nbytes in LEASES_BYTES.items():
            taken_s, late = ping_pong(channel, nbytes, seconds=_LEASE_S, least=_MIN_LEASES, most=_MAX_LEASES)
            one_way_us, share = percentile(taken_s, 0.5) / 2 * 1e6, late / (len(taken_s) + 1)
            remark = f"host slower in {share:.0%}" if late else ""
            found += readings({"one_way_us": one_way_us}, workload=f"{name}-{size}", layout=remark)
    return found


def benchmark(*, only: Sequence[str] = ()) -> tuple[Workload, ...]:
    """Make the benchmark of all workloads, or of those named. Raises `BenchError` for an unknown name."""
    return selected([Throughput(), RoundTrips(), Transports(), ModelledLinks()], only)
