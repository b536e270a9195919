"""What gathering from shards costs: the CN half alone, one request after the other on one thread, with the tables in
this process and on two shards of this machine. Both give the same bits, which is checked first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload
from plait_bench.disagg.load.asking import requests_of
from plait_bench.disagg.load.packages import packaged
from plait_bench.errors import SystemFailed
from plait_disagg.package import open_package
from plait_disagg.package.halves import CompiledSparse
from plait_disagg.values import RankRequest
from plait_fabric.threads import run_on_own_thread, set_threads

__all__ = ["Gathering"]

METRIC = "sparse_p50_us"
HERE, SHARDS = "plait", "plait_shards"

_MODEL, _SCALE, _COUNT = "rm1", 0.125, 2
_BLOCK, _REQUESTS = 60, 24


class Gathering(Workload):
    """The CN half of requests with that many candidates."""

    systems = (HERE, SHARDS)
    ours = SHARDS
    pairs = ((SHARDS, HERE),)
    metrics: Mapping[str, Metric] = {METRIC: Metric(unit="us", better="lower")}

    def __init__(self, candidates: int) -> None:
        self.name = f"shards-{candidates}"
        self._candidates = candidates

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Package the model once, and compare bits."""
        from plait_bench.disagg.systems.shards import on_shards  # the child is that module: not loaded twice

        self._package = open_package(packaged(_MODEL, _SCALE, say=say))
        self._requests = requests_of(self._package, _MODEL, candidates=self._candidates, count=_REQUESTS)
        here = self._package.sparse()
        with on_shards(self._package, _COUNT) as (there, _):
            for request in self._requests:
                one, other = here.run([request]), there.run([request])
                if not all(torch.equal(one[name], other[name]) for name in one):
                    raise SystemFailed("shards give other bits than tables in one process")
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the CN half, with its tables here or on shards."""
        from plait_bench.disagg.systems.shards import on_shards  # the child is that module: not loaded twice

        if system == HERE:
            yield _SparseBlock(self._package.sparse(), self._requests)
            return
        with on_shards(self._package, _COUNT) as (half, _):
            yield _SparseBlock(half, self._requests)


@dataclass(frozen=True)
class _SparseBlock:
    """Implements `Subject`."""

    half: CompiledSparse
    requests: Sequence[RankRequest]

    def warm_up(self) -> None:
        self.measure(0)

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        return [Reading(metric=METRIC, value=run_on_own_thread(self._timed_us))]

    def _timed_us(self) -> float:
        set_threads(1)
        return block_us(lambda number: self.half.run([self.requests[number % len(self.requests)]]))


def block_us(run: Callable[[int], object]) -> float:
    """Run a block of requests, one after the other; return the median in microseconds."""
    taken_us = []
    for number in range(_BLOCK):
        started_s = time.perf_counter()
        run(number)
        taken_us.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(taken_us)
