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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from plait_bench.benchmark import Metric, Reading, Rounds, Say, Subject, Workload, cores
from plait_bench.disagg.goodput import packaged, requests_of
from plait_bench.disagg.ideal import ideal_split
from plait_bench.disagg.ours import split, whole
from plait_disagg.messages.check import check_request
from plait_disagg.protocols import Ranker

WHOLE, SPLIT, IDEAL = "plait", "plait_split", "ideal_split"
PER_S, LATENCY, ADDED = "in_process_per_s", "latency_p50_us", "added_p50_us"
CALLERS = 8
_BLOCK_S, _BLOCK = 2.0, 60
_REQUESTS = 24


class _Here(Workload):
    """Requests of that many candidates for a model with that share of its rows."""

    systems = (WHOLE, SPLIT, IDEAL)
    ours = WHOLE
    pairs = ((SPLIT, WHOLE), (SPLIT, IDEAL))

    def __init__(self, name: str, model: str, scale: float, candidates: int) -> None:
        self.name = name
        self._model, self._scale, self._candidates = model, scale, candidates

    def prepare(self, say: Say) -> None:
        """Package the model once; make requests as a server would have them."""
        self.package = packaged(self._model, self._scale, say=say)
        made = requests_of(self.package, self._model, candidates=self._candidates, count=_REQUESTS)
        card = self.package.card()
        self.requests = [check_request(card, one.tensors, request_id=str(number)) for number, one in enumerate(made)]

    @contextmanager
    def ranked(
        self, measure: Callable[[Ranker], Awaitable[Reading]], threads: int, hns: Sequence[int]
    ) -> Iterator[Subject]:
        """Open the model here, cut if there are HNs, on an event loop that runs only while it is measured."""

        async def opened() -> Ranker:
            return split(self.package, threads, hns) if hns else whole(self.package, threads)

        async def measured(ranker: Ranker) -> list[Reading]:
            return [await measure(ranker)]

        with asyncio.Runner() as runner:
            ranker = runner.run(opened())
            try:
                yield _warmed(lambda: runner.run(measured(ranker)))
            finally:
                runner.run(ranker.close(drain_s=1.0))


def _warmed(take: Callable[[], Sequence[Reading]]) -> Rounds:
    return Rounds(lambda _: take(), warm=take)


class InProcess(_Here):
    """Throughput; the threads are chosen."""

    deciding = PER_S
    metrics: Mapping[str, Metric] = {PER_S: Metric(unit="requests/s", better="higher")}

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names of the thread counts."""
        return list(_ideal_layouts()) if system == IDEAL else list(_layouts(system))

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the model here; for the split, with its dense half in children."""
        if system != IDEAL:
            threads, hns = _layouts(system)[layout]
            with self.ranked(self._throughput, threads, hns) as subject:
                yield subject
            return
        threads, size = _ideal_layouts()[layout]
        batches = [self.requests[first : first + size] for first in range(0, len(self.requests) - size + 1, size)]
        slots = CALLERS // size
        with ideal_split(self.package, batches, threads=threads, hn_threads=threads, slots=slots) as bare:

            def take() -> list[Reading]:
                began_s = time.perf_counter()
                answered = size * bare.answers_for(_BLOCK_S)
                return [Reading(metric=PER_S, value=answered / (time.perf_counter() - began_s))]

            yield _warmed(take)

    async def _throughput(self, ranker: Ranker) -> Reading:
        began_s = time.perf_counter()
        answered = 0

        async def ask(number: int) -> None:
            nonlocal answered
            while time.perf_counter() - began_s < _BLOCK_S:
                await ranker.rank(self.requests[number % len(self.requests)])
                number += CALLERS
                answered += 1

        await asyncio.gather(*(ask(caller) for caller in range(CALLERS)))
        return Reading(metric=PER_S, value=answered / (time.perf_counter() - began_s))


def _ideal_layouts() -> dict[str, tuple[int, int]]:
    """Map names to the threads of each half and the size of batches: two at once, or single requests, on a thread each;
    or one on all cores, which the halves then take in turn."""
    counts = dict.fromkeys([1, cores()])
    found = [(count, size) for count in counts for size in ((CALLERS // 2, 1) if count == 1 else (CALLERS,))]
    return {f"{count}+{count} threads, batches of {size}": (count, size) for count, size in found}


def _layouts(system: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Map names to the threads here and of each HN: one, all cores; for the split also 1 with all, or 1 with 1 per
    core."""
    counts = tuple(dict.fromkeys([1, cores()]))
    if system == WHOLE:
        found: list[tuple[int, tuple[int, ...]]] = [(count, ()) for count in counts]
    else:
        found = [*((count, (count,)) for count in counts), *((1, (each,)) for each in counts[1:]), (1, (1,) * cores())]
    return {f"{'+'.join(map(str, (own, *hns)))} threads": (own, hns) for own, hns in found}


class OneByOne(_Here):
    """Sequential requests on one thread each: what the cut costs."""

    compared = frozenset({LATENCY})
    metrics: Mapping[str, Metric] = {
        LATENCY: Metric(unit="us", better="lower"),
        ADDED: Metric(unit="us", better="lower"),
    }

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the model here, whole or with its dense half in a child."""
        if system != IDEAL:
            with self.ranked(self._latency, 1, (1,) if system == SPLIT else ()) as subject:
                yield subject
            return
        batches = [[request] for request in self.requests]
        with ideal_split(self.package, batches, threads=1, hn_threads=1, slots=1) as bare:

            def take() -> list[Reading]:
                taken_us = []
                for number in range(_BLOCK):
                    began_s = time.perf_counter()
                    bare.answers(number)
                    taken_us.append((time.perf_counter() - began_s) * 1e6)
                return [_median(taken_us)]

            yield _warmed(take)

    async def _latency(self, ranker: Ranker) -> Reading:
        taken_us = []
        for number in range(_BLOCK):
            began_s = time.perf_counter()
            await ranker.rank(self.requests[number % len(self.requests)])
            taken_us.append((time.perf_counter() - began_s) * 1e6)
        return _median(taken_us)

    def derive(self, readings: Mapping[str, Sequence[Reading]]) -> Sequence[Reading]:
        """Subtract whole from the splits: the cost of the cut."""
        if WHOLE not in readings:
            return ()
        whole_us = readings[WHOLE][0].value
        cuts = {system: readings[system][0].value for system in (SPLIT, IDEAL) if system in readings}
        return [Reading(system=system, metric=ADDED, value=us - whole_us) for system, us in cuts.items()]


def _median(taken_us: Sequence[float]) -> Reading:
    return Reading(metric=LATENCY, value=statistics.median(taken_us))
