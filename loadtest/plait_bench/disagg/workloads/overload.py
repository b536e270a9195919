"""Twice the load that the workers can handle, with deadlines: how much of the peak goodput is left?

A CN and an HN in processes of their own, called over shared memory by an open loop (Poisson). Goodput counts answers
that came by their deadline. The same workers, with the same arrivals, run once with the overload controls (earliest
deadline first, early refusal, batches no longer than deadlines allow, an adaptive window) and once without (first
come, first served, a fixed window): the two alternate.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload
from plait_bench.disagg.load.asking import arrivals, closed_loop_per_s, gc_paused, requests_of
from plait_bench.disagg.load.goodput import LIMIT_MS
from plait_bench.disagg.load.packages import packaged
from plait_bench.disagg.systems.served import served
from plait_disagg.errors import Busy, RankError
from plait_disagg.package import open_package
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.values import RankRequest
from plait_disagg.workers.remote import RemoteRanker

__all__ = ["KNOBS", "LOADS", "LoadPhase", "Overload", "open_loop", "share_of_peak"]

NAME = "overload"
METRIC, SHARE = "in_time_per_s", "share_of_peak"

KNOBS: Mapping[str, WorkerKnobs] = {
    "plait_split": WorkerKnobs(),
    "plait_split_fcfs": WorkerKnobs(order="arrival", refuse_late=False, adapt_window=False),
}
"""The systems to compare, with their knobs."""

LOADS = (0.6, 0.8, 1.0, 2.0)
"""Offered rates as shares of a closed loop's throughput. The last one is the overload."""

_MODEL, _SCALE, _CANDIDATES = "criteo-kaggle", 0.25, 512
"""Milliseconds of work per request and few bytes, so that the load generator, which shares the cores, and refused
requests cost little in comparison."""

_REQUESTS, _CALLERS = 48, 16
_PHASE_S, _CLOSED_S = 4.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPhase:
    """The result of one offered rate."""

    offered_per_s: float
    goodput_per_s: float
    refused: int
    late: int

    def __str__(self) -> str:
        late = f"{self.refused} refused, {self.late} late"
        return f"{self.offered_per_s:.0f}/s offered, {self.goodput_per_s:.1f}/s in time, {late}"


class Overload(Workload):
    """A round is a phase at each of `LOADS`; its rows are named after them."""

    name = NAME
    systems = tuple(KNOBS)
    ours = "plait_split"
    metrics: Mapping[str, Metric] = {
        METRIC: Metric(unit="requests/s", better="higher"),
        SHARE: Metric(unit="of its peak", better="higher"),
    }

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Run the workers, and measure their capacity in a closed loop."""
        self.say = say
        package = open_package(packaged(_MODEL, _SCALE, say=say))
        self.requests = requests_of(package, _MODEL, candidates=_CANDIDATES, count=_REQUESTS)
        with served(package, "split") as (self.ranker, self.processes), asyncio.Runner() as self.runner:
            closed = closed_loop_per_s(self.ranker, self.requests, callers=_CALLERS, seconds=_CLOSED_S)
            self.capacity_per_s = self.runner.run(closed)
            say(f"{NAME}: a closed loop reaches {self.capacity_per_s:.0f}/s")
            yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the workers, which are already running, with a system's knobs."""
        yield _Phases(self, system)


@dataclass(frozen=True)
class _Phases:
    """A `Subject`: the workers, with a system's knobs."""

    workload: Overload
    system: str

    def warm_up(self) -> None:
        """Do nothing: the closed loop has warmed the workers up."""

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        workload = self.workload
        for process in workload.processes:
            process.configure(KNOBS[self.system])
        phases = []
        for load in LOADS:
            asking = open_loop(
                workload.ranker, workload.requests, load * workload.capacity_per_s, seconds=_PHASE_S, seed=number
            )
            with gc_paused():
                phases.append(workload.runner.run(asking))
            workload.say(f"{NAME}: {self.system} {load:g}x: {phases[-1]}")
        names = [f"{NAME}-{load:g}x" for load in LOADS]
        found = [
            Reading(workload=name, metric=METRIC, value=phase.goodput_per_s)
            for name, phase in zip(names, phases, strict=True)
        ]
        return [*found, Reading(workload=names[-1], metric=SHARE, value=share_of_peak(phases))]


def share_of_peak(phases: Sequence[LoadPhase]) -> float:
    """Divide the goodput of the last phase, the overload, by the best of all phases of the round."""
    return phases[-1].goodput_per_s / max(phase.goodput_per_s for phase in phases)


async def open_loop(
    ranker: RemoteRanker, requests: Sequence[RankRequest], rate_per_s: float, *, seconds: float, seed: int
) -> LoadPhase:
    """Run one phase; a request's deadline counts from the time at which it was due to be sent."""
    chance = random.Random(seed)

    async def ask(request: RankRequest, deadline_s: float) -> bool | None:
        try:
            await ranker.rank(replace(request, deadline_s=deadline_s))
        except Busy:
            return None
        except RankError:
            return False
        return time.monotonic() <= deadline_s

    asked = [
        asyncio.create_task(ask(chance.choice(requests), due_s + LIMIT_MS / 1e3))
        async for due_s in arrivals(rate_per_s, seconds, chance)
    ]
    outcomes = [await task for task in asked]
    return LoadPhase(
        offered_per_s=rate_per_s,
        goodput_per_s=outcomes.count(True) / seconds,
        refused=outcomes.count(None),
        late=outcomes.count(False),
    )
