"""Throughput of whole and split without HTTP: callers in this process, on the same cores.

As in `one_by_one`, the split's dense half is in a child process, over shared memory. A round is a block of requests,
and its value the block's throughput with `CALLERS` requests in flight. `ideal_split` is what a split can be
(`systems/ideal.py`): the same halves, the same processes and as many requests in flight, and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload
from plait_bench.disagg.load.asking import Asked, asked, requests_of
from plait_bench.disagg.load.packages import packaged
from plait_bench.disagg.systems.ideal import IdealSplit, ideal_split
from plait_bench.host import cores
from plait_disagg.package import Package, open_package
from plait_disagg.protocols import Ranker
from plait_disagg.values import RankRequest

__all__ = ["InProcess"]

METRIC = "in_process_per_s"
WHOLE, SPLIT, IDEAL = "plait", "plait_split", "ideal_split"
CALLERS = 8
_BLOCK_S = 2.0
_REQUESTS = 24


class InProcess(Workload):
    """Requests of that many candidates for a model with that share of its rows."""

    systems = (WHOLE, SPLIT, IDEAL)
    ours = WHOLE
    pairs = ((SPLIT, WHOLE), (SPLIT, IDEAL))
    deciding = METRIC
    metrics: Mapping[str, Metric] = {METRIC: Metric(unit="requests/s", better="higher")}

    def __init__(self, model: str, scale: float, candidates: int) -> None:
        self.name = f"in-process-{model}-{candidates}"
        self._model, self._scale, self._candidates = model, scale, candidates

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Package the model once."""
        self._package = open_package(packaged(self._model, self._scale, say=say))
        self._requests = requests_of(self._package, self._model, candidates=self._candidates, count=_REQUESTS)
        yield

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names of the thread counts."""
        return list(_ideal_layouts()) if system == IDEAL else list(_layouts(system))

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the model here; for the split, with its dense half in children."""
        if system == IDEAL:
            with _ideal(self._package, self._requests, *_ideal_layouts()[layout]) as subject:
                yield subject
            return
        threads, hns = _layouts(system)[layout]
        with asked(lambda: _open(self._package, threads, hns)) as ranker:
            yield _InProcessBlock(ranker, self._requests)


@dataclass(frozen=True)
class _InProcessBlock:
    """Implements `Subject`."""

    asked: Asked
    requests: Sequence[RankRequest]

    def warm_up(self) -> None:
        self.measure(0)

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        per_s = self.asked.runner.run(_throughput_per_s(self.asked.ranker, self.requests))
        return [Reading(metric=METRIC, value=per_s)]


@dataclass(frozen=True)
class _IdealFlowBlock:
    """Implements `Subject`."""

    split: IdealSplit
    size: int

    def warm_up(self) -> None:
        self.measure(0)

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        began_s = time.perf_counter()
        answered = self.size * self.split.answers_for(_BLOCK_S)
        return [Reading(metric=METRIC, value=answered / (time.perf_counter() - began_s))]


def _ideal_layouts() -> dict[str, tuple[int, int]]:
    """Map names to the threads of each half and the size of batches: two at once, or single requests, on a thread each;
    or one on all cores, which the halves then take in turn."""
    counts = dict.fromkeys([1, cores()])
    found = [(count, size) for count in counts for size in ((CALLERS // 2, 1) if count == 1 else (CALLERS,))]
    return {f"{count}+{count} threads, batches of {size}": (count, size) for count, size in found}


@contextmanager
def _ideal(package: Package, requests: Sequence[RankRequest], threads: int, size: int) -> Iterator[Subject]:
    batches = [requests[first : first + size] for first in range(0, len(requests) - size + 1, size)]
    with ideal_split(package, batches, threads=threads, hn_threads=threads, slots=CALLERS // size) as split:
        yield _IdealFlowBlock(split, size)


def _layouts(system: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Map names to the threads here and of each HN: one, all cores; for the split also 1 with all, or 1 with 1 per
    core."""
    counts = tuple(dict.fromkeys([1, cores()]))
    if system == WHOLE:
        found: list[tuple[int, tuple[int, ...]]] = [(count, ()) for count in counts]
    else:
        found = [*((count, (count,)) for count in counts), *((1, (each,)) for each in counts[1:]), (1, (1,) * cores())]
    return {f"{'+'.join(map(str, (own, *hns)))} threads": (own, hns) for own, hns in found}


def _open(package: Package, threads: int, hns: Sequence[int]) -> Ranker:
    """Open the model whole if there are no HNs, else cut."""
    from plait_bench.disagg.systems.ours import split, whole  # the child is that module, which must not be loaded twice

    return split(package, threads, hns) if hns else whole(package, threads)


async def _throughput_per_s(ranker: Ranker, requests: Sequence[RankRequest]) -> float:
    """Measure answers per second with `CALLERS` requests in flight, for `_BLOCK_S`."""
    began_s = time.perf_counter()
    answered = 0

    async def ask(number: int) -> None:
        nonlocal answered
        while time.perf_counter() - began_s < _BLOCK_S:
            await ranker.rank(requests[number % len(requests)])
            number += CALLERS
            answered += 1

    await asyncio.gather(*(ask(caller) for caller in range(CALLERS)))
    return answered / (time.perf_counter() - began_s)
