"""How soon 64 bytes are back from another process over shared memory, with both sides spinning and with both asleep.

Where they run is left to the scheduler: pinned to a core each, sleepers pay for waking an idle core.
"""

from __future__ import annotations

import tempfile

from plait_bench.fabric.values import PEER_START_S, RoundValue
from plait_bench.summary import percentile
from plait_fabric import FabricOptions, listen, new_secret
from plait_fabric.testing.peer import spawned_peer
from plait_fabric.testing.round_trips import round_trips_us

__all__ = ["WORKLOAD", "take"]

WORKLOAD = "round-trip-64b"
_BYTES, _REPEATS = 64, 10_000
_SPIN_S = 0.2
"""Longer than any answer takes, so that nobody ever sleeps."""


def take() -> list[RoundValue]:
    """The median of one run of each."""
    return [_taken(system, spin_s) for system, spin_s in (("spinning", _SPIN_S), ("blocking", 0.0))]


def _taken(system: str, spin_s: float) -> RoundValue:
    secret = new_secret()
    options = FabricOptions(spin_s=spin_s)
    with (
        tempfile.TemporaryDirectory(prefix="plait-bench-") as folder,
        listen(f"shm://{folder}/socket", secret=secret, options=options) as listener,
        spawned_peer("echo", listener.address, secret, {"spin_s": spin_s}),
        listener.accept(PEER_START_S) as channel,
    ):
        round_trips_us(channel, _BYTES, min(500, _REPEATS))
        median_us = percentile(round_trips_us(channel, _BYTES, _REPEATS), 0.5)
    return RoundValue(workload=WORKLOAD, system=system, metric="round_trip_us", value=median_us)
