"""Round-trip time of 64 bytes to another process over shared memory, with both sides spinning and with both asleep.

Beside each stands the least that Python can do (`bare.py`): shared memory, and an eventfd where both sleep. Processes
are placed by the scheduler: pinned to a core each, sleepers pay for waking an idle core.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from plait_bench.benchmark import Metric, Reading, Subject, Workload
from plait_bench.fabric.bare import bare_round_trips_us
from plait_bench.fabric.values import PEER_START_S, WAIT_S, CallSubject
from plait_bench.summary import percentile
from plait_fabric import Channel, FabricOptions, listen, new_secret
from plait_fabric.testing.peer import spawned_peer

__all__ = ["WORKLOAD", "RoundTrips", "round_trips_us"]

WORKLOAD = "round-trip-64b"
_BYTES, _REPEATS, _WARM_UP = 64, 10_000, 500
_SPIN_S: Mapping[str, float] = {"spinning": 0.2, "blocking": 0.0}
"""How long each system spins: "spinning" spins for longer than any answer takes, so that neither side ever sleeps."""
_BARE: Mapping[str, str] = {f"bare_{name}": name for name in _SPIN_S}
"""The ping-pong beside each system."""


class RoundTrips(Workload):
    """The median round trip of a run of messages."""

    name = WORKLOAD
    systems = (*_SPIN_S, *_BARE)
    pairs = tuple((name, bare) for bare, name in _BARE.items())
    metrics: Mapping[str, Metric] = {"round_trip_us": Metric(unit="us", better="lower")}

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open a channel, or start a bare peer, for each round."""
        yield CallSubject(lambda: [Reading(metric="round_trip_us", value=_round_trip_us(system))])


def round_trips_us(channel: Channel, nbytes: int, repeats: int) -> list[float]:
    """Time `repeats` messages with one buffer over a channel whose peer echoes: send, receive, release."""
    payload = memoryview(os.urandom(nbytes))
    times_us: list[float] = []
    for _ in range(repeats):
        began_ns = time.perf_counter_ns()
        channel.send({"n": 0}, [payload])
        channel.recv(WAIT_S).release()
        times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
    return times_us


def _round_trip_us(system: str) -> float:
    """Return the median of a run. Whatever starts with the peer belongs to the warm-up."""
    if system in _SPIN_S:
        return _median_us(_SPIN_S[system])
    times_us = bare_round_trips_us(_BYTES, _WARM_UP + _REPEATS, spins=_SPIN_S[_BARE[system]] > 0)
    return percentile(times_us[_WARM_UP:], 0.5)


def _median_us(spin_s: float) -> float:
    secret = new_secret()
    options = FabricOptions(spin_s=spin_s)
    with (
        tempfile.TemporaryDirectory(prefix="plait-bench-") as folder,
        listen(f"shm://{folder}/socket", secret=secret, options=options) as listener,
        spawned_peer("echo", listener.address, secret, {"spin_s": spin_s}),
        listener.accept(PEER_START_S) as channel,
    ):
        round_trips_us(channel, _BYTES, min(_WARM_UP, _REPEATS))
        return percentile(round_trips_us(channel, _BYTES, _REPEATS), 0.5)
