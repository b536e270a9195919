"""Twice what the workers can do, with deadlines: how much of the peak goodput is left?

A CN and an HN in processes of their own, asked over shared memory by an open loop (Poisson). Goodput counts answers
that came by their deadline. The same workers, with the same arrivals, once with what tames overload (earliest deadline
first, early refusal, batches no longer than deadlines bear, a window that adapts) and once without (first come, first
served, a fixed window): the two take turns.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait_bench.benchmark import ResultRow
from plait_bench.disagg.asking import arrivals, closed_loop_per_s, gc_paused, requests_of
from plait_bench.disagg.goodput import LIMIT_MS
from plait_bench.disagg.packages import packaged
from plait_bench.disagg.served import WorkerProcess, served
from plait_bench.runner import Result
from plait_disagg.errors import Busy, RankError
from plait_disagg.package import open_package
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.values import RankRequest
from plait_disagg.workers.remote import RemoteRanker

__all__ = ["KNOBS", "LOADS", "NAME", "LoadPhase", "goodput_kept", "open_loop", "result"]

NAME = "overload"
METRIC, UNIT, SHARE = "in_time_per_s", "requests/s", "share_of_peak"

KNOBS: Mapping[str, WorkerKnobs] = {
    "plait_split": WorkerKnobs(),
    "plait_split_fcfs": WorkerKnobs(order="arrival", refuse_late=False, adapt_window=False),
}
"""What is compared."""

LOADS = (0.6, 0.8, 1.0, 2.0)
"""Offered, in shares of what a closed loop reaches. The last is the overload."""

_MODEL, _SCALE, _CANDIDATES = "criteo-kaggle", 0.25, 512
"""Milliseconds of work per request and few bytes, so that the load generator, which shares the cores, and what is
refused cost little beside it."""

_REQUESTS, _CALLERS = 48, 16
_PHASE_S, _CLOSED_S = 4.0, 3.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPhase:
    """What came of one rate."""

    offered_per_s: float
    goodput_per_s: float
    refused: int
    late: int

    def __str__(self) -> str:
        late = f"{self.refused} refused, {self.late} late"
        return f"{self.offered_per_s:.0f}/s offered, {self.goodput_per_s:.1f}/s in time, {late}"


def result(*, rounds: int, say: Say) -> Result:
    """Goodput at each of `LOADS`, and what is left of its peak at the last. Raises `SystemFailed`."""
    package = open_package(packaged(_MODEL, _SCALE, say=say))
    requests = requests_of(package, _MODEL, candidates=_CANDIDATES, count=_REQUESTS)
    with served(package, "split") as (ranker, processes):
        taken = asyncio.run(_rounds(ranker, requests, processes, rounds, say))
    rows = [
        ResultRow.of(
            [phases[i].goodput_per_s for phases in by_round],
            system=system, workload=f"{NAME}-{load:g}x", metric=METRIC, unit=UNIT,
        )
        for system, by_round in taken.items()
        for i, load in enumerate(LOADS)
    ]  # fmt: skip
    return Result(rows=(*rows, *goodput_kept(taken)), ratios={}, left_out={})


def goodput_kept(taken: Mapping[str, Sequence[Sequence[LoadPhase]]]) -> list[ResultRow]:
    """Goodput in overload by its peak, of every system and round by round."""
    found = []
    for system, by_round in taken.items():
        over = [phases[-1].goodput_per_s for phases in by_round]
        peak = [max(phase.goodput_per_s for phase in phases) for phases in by_round]
        shares = [one / most for one, most in zip(over, peak, strict=True)]
        workload = f"{NAME}-{LOADS[-1]:g}x"
        found.append(ResultRow.of(shares, system=system, workload=workload, metric=SHARE, unit="of its peak"))
    return found


async def _rounds(
    ranker: RemoteRanker,
    requests: Sequence[RankRequest],
    processes: Sequence[WorkerProcess],
    rounds: int,
    say: Say,
) -> dict[str, list[list[LoadPhase]]]:
    capacity_per_s = await closed_loop_per_s(ranker, requests, callers=_CALLERS, seconds=_CLOSED_S)
    say(f"{NAME}: a closed loop reaches {capacity_per_s:.0f}/s")
    taken: dict[str, list[list[LoadPhase]]] = {system: [] for system in KNOBS}
    for number in range(rounds):
        for system, knobs in KNOBS.items():
            for process in processes:
                await asyncio.to_thread(process.configure, knobs)
            phases = []
            for load in LOADS:
                rate_per_s = load * capacity_per_s
                with gc_paused():
                    phases.append(await open_loop(ranker, requests, rate_per_s, seconds=_PHASE_S, seed=number))
                say(f"{NAME}: round {number + 1} of {rounds}: {system} {load:g}x: {phases[-1]}")
            taken[system].append(phases)
    return taken


async def open_loop(
    ranker: RemoteRanker, requests: Sequence[RankRequest], rate_per_s: float, *, seconds: float, seed: int
) -> LoadPhase:
    """One phase; the deadline of a request counts from the moment at which it was due to be sent."""
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
