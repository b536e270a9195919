"""Shared memory against memcpy: messages of 1 MiB out of 64 MiB that no cache holds.

The fabric's sender copies each into its segment, and the receiver, another process, reads every byte (it returns their
sum, which is checked). memcpy copies the same source piece by piece into as much memory again, and nobody reads it.
"""

from __future__ import annotations

import tempfile
import time

import numpy as np

from plait_bench.errors import BenchError
from plait_bench.fabric.values import PEER_START_S, WAIT_S, RoundValue, pinned_apart
from plait_fabric import Channel, listen, new_secret
from plait_fabric.memory.pool import copy_bytes
from plait_fabric.testing.peer import spawned_peer

__all__ = ["MESSAGE_BYTES", "SOURCE_BYTES", "WORKLOAD", "take"]

WORKLOAD = "shm-1mib"
MESSAGE_BYTES, SOURCE_BYTES = 1 << 20, 64 << 20
_PASSES = 12


def take() -> list[RoundValue]:
    """One round: memcpy, the fabric, memcpy again; memcpy's value is that of both."""
    source = np.random.default_rng(1).integers(0, 2**63, SOURCE_BYTES // 8, dtype=np.uint64)
    view = memoryview(source.data).cast("B")
    pieces = [view[start : start + MESSAGE_BYTES] for start in range(0, SOURCE_BYTES, MESSAGE_BYTES)]
    target = memoryview(bytearray(SOURCE_BYTES))
    before_s = _copy_s(pieces, target)
    sent_s, layout = _sent_s(pieces, int(source.sum(dtype=np.uint64)))
    copied_s = (before_s + _copy_s(pieces, target)) / 2
    nbytes = _PASSES * SOURCE_BYTES
    return [
        RoundValue(workload=WORKLOAD, system="plait", metric="gb_per_s", value=nbytes / sent_s / 1e9, layout=layout),
        RoundValue(workload=WORKLOAD, system="memcpy", metric="gb_per_s", value=nbytes / copied_s / 1e9),
    ]


def _copy_s(pieces: list[memoryview], target: memoryview) -> float:
    """Seconds for all passes after one that touches the pages."""
    started_s = 0.0
    for number in range(_PASSES + 1):
        if number == 1:
            started_s = time.perf_counter()
        for place, piece in enumerate(pieces):
            copy_bytes(target[place * MESSAGE_BYTES : (place + 1) * MESSAGE_BYTES], piece)
    return time.perf_counter() - started_s


def _sent_s(pieces: list[memoryview], checksum: int) -> tuple[float, str]:
    """Seconds for all passes after one that touches the pages, and on which cores."""
    secret = new_secret()
    with (
        tempfile.TemporaryDirectory(prefix="plait-bench-") as folder,
        listen(f"shm://{folder}/socket", secret=secret) as listener,
        spawned_peer("drain", listener.address, secret) as peer,
        listener.accept(PEER_START_S) as channel,
        pinned_apart(peer.pid) as layout,
    ):
        _send_all(channel, pieces, 1, checksum)
        started_s = time.perf_counter()
        _send_all(channel, pieces, _PASSES, checksum)
        return time.perf_counter() - started_s, layout


def _send_all(channel: Channel, pieces: list[memoryview], passes: int, checksum: int) -> None:
    for _ in range(passes):
        for piece in pieces:
            channel.send({}, [piece])
    channel.send({"end": True})
    with channel.recv(WAIT_S) as answer:
        if answer.header != {"bytes": passes * SOURCE_BYTES, "sum": passes * checksum % 2**64}:
            raise BenchError("the receiver did not read what was sent")
