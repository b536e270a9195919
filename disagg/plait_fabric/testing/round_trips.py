"""How fast the fabric is here: `python -m plait_fabric.testing.round_trips` prints one JSON document.

A round trip is: send a message with one buffer, the peer (another process for shm and tcp, a
thread for inproc) sends the same bytes back, receive and release. `copy` is one copy of as many
bytes in this process, for comparison. Times are in microseconds; every row is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from plait_fabric.endpoints import connect, listen
from plait_fabric.memory.pool import copy_bytes
from plait_fabric.protocols import Channel
from plait_fabric.testing.peer import echo, spawned_peer
from plait_fabric.transport.auth import new_secret

__all__ = ["main", "measure", "round_trips_us"]

SIZES_BYTES = {"64 B": 64, "1 KB": 1_000, "1 MB": 1_000_000, "16 MB": 16_000_000}
_WARM_UP = 20
_PEER_START_S = 30.0


def round_trips_us(channel: Channel, nbytes: int, repeats: int) -> list[float]:
    """Round-trip times of `repeats` messages of `nbytes` over a channel whose peer echoes."""
    payload = memoryview(bytearray(os.urandom(min(nbytes, 4096)) * (nbytes // min(nbytes, 4096) + 1)))[:nbytes]

    def once() -> None:
        channel.send({"n": 0}, [payload])
        channel.recv(60.0).release()

    return _timed_us(once, repeats)


def _timed_us(once: Callable[[], None], repeats: int) -> list[float]:
    for _ in range(min(_WARM_UP, repeats)):
        once()
    times_us: list[float] = []
    for _ in range(repeats):
        start_ns = time.perf_counter_ns()
        once()
        times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    return times_us


@contextmanager
def echoing(scheme: str) -> Iterator[Channel]:
    """A channel of the scheme whose peer echoes."""
    secret = new_secret()
    with tempfile.TemporaryDirectory(prefix="plait-fabric-") as folder:
        addresses = {
            "inproc": "inproc://measure",
            "shm": f"shm://{folder}/socket",
            "tcp": "tcp://127.0.0.1:0",
        }
        with listen(addresses[scheme], secret=secret) as listener:
            if scheme == "inproc":
                channel = connect(listener.address, secret=secret)
                peer = threading.Thread(target=echo, args=(listener.accept(_PEER_START_S),))
                peer.start()
                with channel:
                    yield channel
                peer.join()
                return
            with spawned_peer("echo", listener.address, secret), listener.accept(_PEER_START_S) as channel:
                yield channel


def _row(system: str, workload: str, times_us: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(times_us)

    def quantile(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)

    return {
        "system": system,
        "workload": workload,
        "metric": "round_trip" if system != "copy" else "copy",
        "unit": "us",
        "value": quantile(0.5),
        "p20": quantile(0.2),
        "p80": quantile(0.8),
        "p99": quantile(0.99),
        "n": len(ordered),
        "kind": "measured",
    }


def measure(schemes: Sequence[str], *, seconds_a_row: float) -> dict[str, Any]:
    """Measure each scheme at each size for about `seconds_a_row`; returns the document that `main` prints."""
    rows: list[dict[str, Any]] = []
    for scheme in schemes:
        with echoing(scheme) as channel:
            for workload, nbytes in SIZES_BYTES.items():
                trial_us = round_trips_us(channel, nbytes, 10)
                repeats = max(20, min(5000, int(seconds_a_row * 1e6 / max(1.0, sorted(trial_us)[5]))))
                rows.append(_row(scheme, workload, round_trips_us(channel, nbytes, repeats)))
    for workload, nbytes in SIZES_BYTES.items():
        source, target = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        rows.append(_row("copy", workload, _timed_us(lambda t=target, s=source: copy_bytes(t, s), 100)))  # type: ignore[misc]
    host = {"machine": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
    return {"bench": "fabric", "kind": "measured", "host": host, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; data on stdout."""
    parser = argparse.ArgumentParser(prog="python -m plait_fabric.testing.round_trips", description=__doc__)
    parser.add_argument("schemes", nargs="*", default=["inproc", "shm", "tcp"], help="inproc, shm, tcp (default: all)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each row (default 0.5)")
    chosen = parser.parse_args(arguments)
    json.dump(measure(chosen.schemes, seconds_a_row=chosen.seconds), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
