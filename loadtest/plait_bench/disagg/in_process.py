"""Whole against split without HTTP: callers in this process, on the same cores. The split's dense half is in a child
process, over shared memory. `ideal_split` is what a split can be (`ideal.py`): the same halves and processes, and
nothing else.

`InProcess` is throughput with `CALLERS` requests in flight; `OneByOne` the latency of a single request. A round is a
block of requests.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from plait_bench.benchmark import Say, Subject, Workload, cores, readings
from plait_bench.disagg.goodput import packaged, requests_of
from plait_bench.disagg.ideal import IdealSplit, ideal_split
from plait_bench.disagg.ours import split, whole
from plait_disagg.messages.check import check_request
from plait_disagg.protocols import Ranker

WHOLE, SPLIT, IDEAL = "plait", "plait_split", "ideal_split"
PER_S, LATENCY = "in_process_per_s", "latency_p50_us"
CALLERS = 8
_BLOCK_S, _BLOCK = 2.0, 60
_REQUESTS = 24


class _Here(Workload):
    """Requests of that many candidates for a model; `callers` of them in flight."""

    systems = (WHOLE, SPLIT, IDEAL)
    pairs = ((SPLIT, WHOLE), (SPLIT, IDEAL))
    callers: int
    metric: str

    def __init__(self, name: str, model: str, candidates: int) -> None:
        self.name, self._model, self._candidates = name, model, candidates

    def prepare(self, say: Say) -> None:
        """Package the model once; make requests as a server would have them."""
        self.package = packaged(self._model, say=say)
        made = requests_of(self.package, self._model, candidates=self._candidates, count=_REQUESTS)
        card = self.package.card()
        self.requests = [check_request(card, one.tensors, request_id=str(number)) for number, one in enumerate(made)]

    @abstractmethod
    def ways(self, system: str) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Map layouts to the threads here, and those of each HN; for the ideal split of either half, and the size of
        batches."""

    @abstractmethod
    async def ranked(self, ranker: Ranker) -> float:
        """Measure a ranker."""

    @abstractmethod
    def bare(self, halves: IdealSplit, size: int) -> float:
        """Measure bare halves, with batches of a size."""

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names of the layouts."""
        return list(self.ways(system))

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the model here, for a split with its dense half in children."""
        threads, rest = self.ways(system)[layout]
        if system == IDEAL:
            (size,) = rest
            batches = [self.requests[first : first + size] for first in range(0, len(self.requests) - size + 1, size)]
            slots = self.callers // size
            with ideal_split(self.package, batches, threads=threads, hn_threads=threads, slots=slots) as halves:
                yield self._warmed(lambda: self.bare(halves, size))
            return

        async def opened() -> Ranker:
            return split(self.package, threads, rest) if rest else whole(self.package, threads)

        with asyncio.Runner() as runner:  # the event loop runs only while it is measured
            ranker = runner.run(opened())
            try:
                yield self._warmed(lambda: runner.run(self.ranked(ranker)))
            finally:
                runner.run(ranker.close(drain_s=1.0))

    def _warmed(self, measure: Callable[[], float]) -> Subject:
        return Subject(lambda _: readings({self.metric: measure()}), warm_up=measure)


class InProcess(_Here):
    """Throughput; the threads are chosen."""

    callers, metric, deciding = CALLERS, PER_S, PER_S
    metrics: Mapping[str, str] = {PER_S: "requests/s"}

    def ways(self, system: str) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Return one thread and all cores; for the split also 1 with all, or 1 with 1 per core. The ideal split takes
        two batches at once, or single requests, on a thread each; or one on all cores, which the halves then take in
        turn."""
        counts = tuple(dict.fromkeys([1, cores()]))
        if system == IDEAL:
            found = [(count, size) for count in counts for size in ((CALLERS // 2, 1) if count == 1 else (CALLERS,))]
            return {f"{count}+{count} threads, batches of {size}": (count, (size,)) for count, size in found}
        ways: list[tuple[int, tuple[int, ...]]] = [(count, ()) for count in counts]
        if system == SPLIT:
            ways = [*((count, (count,)) for count in counts), *((1, (each,)) for each in counts[1:])]
            ways.append((1, (1,) * cores()))
        return {f"{'+'.join(map(str, (own, *hns)))} threads": (own, hns) for own, hns in ways}

    async def ranked(self, ranker: Ranker) -> float:
        """Return the requests per second."""
        began_s = time.perf_counter()
        answered = 0

        async def ask(number: int) -> None:
            nonlocal answered
            while time.perf_counter() - began_s < _BLOCK_S:
                await ranker.rank(self.requests[number % len(self.requests)])
                number += CALLERS
                answered += 1

        await asyncio.gather(*(ask(caller) for caller in range(CALLERS)))
        return answered / (time.perf_counter() - began_s)

    def bare(self, halves: IdealSplit, size: int) -> float:
        """Return the requests per second."""
        began_s = time.perf_counter()
        answered = size * halves.answers_for(_BLOCK_S)
        return answered / (time.perf_counter() - began_s)


class OneByOne(_Here):
    """Sequential requests on one thread each: what the cut costs."""

    callers, metric = 1, LATENCY
    metrics: Mapping[str, str] = {LATENCY: "us"}

    def ways(self, system: str) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Return the only one."""
        return {"": (1, () if system == WHOLE else (1,))}

    async def ranked(self, ranker: Ranker) -> float:
        """Return the median latency."""
        taken_s = []
        for number in range(_BLOCK):
            began_s = time.perf_counter()
            await ranker.rank(self.requests[number % len(self.requests)])
            taken_s.append(time.perf_counter() - began_s)
        return 1e6 * statistics.median(taken_s)

    def bare(self, halves: IdealSplit, size: int) -> float:
        """Return the median latency."""
        taken_s = []
        for number in range(_BLOCK):
            began_s = time.perf_counter()
            halves.answers(number)
            taken_s.append(time.perf_counter() - began_s)
        return 1e6 * statistics.median(taken_s)
