"""Shared memory against memcpy: messages of 1 MiB from a 64 MiB source that no cache holds.

The fabric's sender copies each into its segment, and the receiver, another process, reads every byte (it returns
their sum, which is checked). memcpy copies the same source piece by piece into an equally large buffer, which nobody
reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from plait_bench.benchmark import Reading, Say, Workload, readings
from plait_bench.errors import BenchError
from plait_bench.fabric.peer import WAIT_S, channel_to, drain, on_separate_cores
from plait_fabric import Channel
from plait_fabric.memory.pool import copy_bytes

MESSAGE_BYTES, SOURCE_BYTES = 1 << 20, 64 << 20
_PASSES = 12


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
