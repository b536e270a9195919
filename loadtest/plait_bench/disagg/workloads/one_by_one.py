"""The cost of the cut for a single request: whole against split, in process, without HTTP.

The split's dense half is in a child process, over shared memory. A round is a block of requests, and its value the
block's median. `ideal_split` is what a split can be (`systems/ideal.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload
from plait_bench.disagg.load.asking import Asked, asked, requests_of, wait_until_ready
from plait_bench.disagg.load.packages import packaged
from plait_bench.disagg.systems.ideal import IdealSplit, ideal_split
from plait_disagg.package import Package, open_package
from plait_disagg.protocols import Ranker
from plait_disagg.values import RankRequest
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.whole import WholeRanker

__all__ = ["OneByOne"]

METRIC, ADDED = "latency_p50_us", "added_p50_us"
WHOLE, SPLIT, IDEAL = "plait", "plait_split", "ideal_split"

_MODEL, _SCALE = "rm1", 0.125
_BLOCK, _REQUESTS = 60, 24


class OneByOne(Workload):
    """Sequential requests with that many candidates."""

    systems = (WHOLE, SPLIT, IDEAL)
    ours = WHOLE
    pairs = ((SPLIT, WHOLE), (SPLIT, IDEAL))
    metrics: Mapping[str, Metric] = {
        METRIC: Metric(unit="us", better="lower"),
        ADDED: Metric(unit="us", better="lower"),
    }

    def __init__(self, candidates: int) -> None:
        self.name = f"one-by-one-{candidates}"
        self._candidates = candidates

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Package the model once."""
        self._package = open_package(packaged(_MODEL, _SCALE, say=say))
        self._requests = requests_of(self._package, _MODEL, candidates=self._candidates, count=_REQUESTS)
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the model here, whole or with its dense half in a child."""
        if system == IDEAL:
            batches = [[request] for request in self._requests]
            with ideal_split(self._package, batches, threads=1, hn_threads=1, slots=1) as split:
                yield _IdealSequence(split)
            return
        with asked(lambda: _whole(self._package) if system == WHOLE else _split(self._package)) as ranker:
            yield _SequentialBlock(ranker, self._requests)

    def derive(self, readings: Mapping[str, Sequence[Reading]]) -> Sequence[Reading]:
        """Subtract whole from the splits: the cost of the cut."""
        if WHOLE not in readings:
            return ()
        whole_us = readings[WHOLE][0].value
        cuts = {system: readings[system][0].value for system in (SPLIT, IDEAL) if system in readings}
        return [Reading(system=system, metric=ADDED, value=us - whole_us) for system, us in cuts.items()]


@dataclass(frozen=True)
class _SequentialBlock:
    """Implements `Subject`."""

    asked: Asked
    requests: Sequence[RankRequest]

    def warm_up(self) -> None:
        self.measure(0)

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        return [Reading(metric=METRIC, value=self.asked.runner.run(block_us(self.asked.ranker, self.requests)))]


@dataclass(frozen=True)
class _IdealSequence:
    """Implements `Subject`."""

    split: IdealSplit

    def warm_up(self) -> None:
        self.measure(0)

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        taken_us = []
        for index in range(_BLOCK):
            started_s = time.perf_counter()
            self.split.answers(index)
            taken_us.append((time.perf_counter() - started_s) * 1e6)
        return [Reading(metric=METRIC, value=statistics.median(taken_us))]


def _whole(package: Package) -> Ranker:
    return WholeRanker(package.card(), package.sparse(), package.dense(prepares=True))


def _split(package: Package) -> Ranker:
    from plait_bench.disagg.systems.ours import start_dense  # the child is that module, which must not be loaded twice

    ranker = CoreRanker(CnCore(package.card(mode="split"), package.sparse(), start_dense(package, 1)))
    wait_until_ready(ranker.core)
    return ranker


async def block_us(ranker: Ranker, requests: Sequence[RankRequest]) -> float:
    """Send a block of requests, one after the other; return the median latency in microseconds."""
    taken_us = []
    for number in range(_BLOCK):
        started_s = time.perf_counter()
        await ranker.rank(requests[number % len(requests)])
        taken_us.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(taken_us)
