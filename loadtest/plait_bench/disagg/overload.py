"""Twice what the workers can do, with deadlines: how much of the peak goodput is left?

A CN and an HN in processes of their own, asked over shared memory by an open loop (Poisson). Goodput counts answers
that came by their deadline. The same workers, with the same arrivals, once with what tames overload (earliest deadline
first, early refusal, batches no longer than deadlines bear, a window that adapts) and once without (first come, first
served, a fixed window): the two take turns.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from plait_bench.benchmark import Row
from plait_bench.disagg.goodput import LIMIT_MS
from plait_bench.disagg.packages import packaged
from plait_bench.errors import SystemFailed
from plait_bench.runner import Result
from plait_bench.summary import Summary, pairwise_ratio, summarise
from plait_disagg.fabric import connect, new_secret
from plait_disagg.models.configs import ids_per_bag
from plait_disagg.models.requests import random_request
from plait_disagg.package import open_package
from plait_disagg.replicas import Link
from plait_disagg.workers.check import check_request
from plait_disagg.workers.errors import Busy, RankError
from plait_disagg.workers.knobs import WorkerKnobs
from plait_disagg.workers.remote import RemoteRanker
from plait_disagg.workers.values import RankRequest
from plait_serving.deployments.reach import FABRIC

__all__ = ["KNOBS", "LOADS", "NAME", "Phase", "open_loop", "ratios", "result"]

NAME = "overload"
METRIC, UNIT = "in_time_per_s", "requests/s"

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
_PHASE_S, _CLOSED_S, _START_S = 4.0, 3.0, 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
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
    folder = packaged(_MODEL, _SCALE, say=say)
    with workers(folder) as (ranker, configure):
        taken = asyncio.run(_rounds(ranker, make_requests(folder), configure, rounds, say))
    rows = [
        _row(f"{NAME}-{load:g}x", system, [phases[i].goodput_per_s for phases in by_round])
        for system, by_round in taken.items()
        for i, load in enumerate(LOADS)
    ]
    return Result(rows=tuple(rows), ratios=ratios(taken), left_out={})


def ratios(taken: Mapping[str, Sequence[Sequence[Phase]]]) -> dict[str, Summary]:
    """Goodput in overload by its peak, of every system."""
    found = {}
    for system, by_round in taken.items():
        over = [phases[-1].goodput_per_s for phases in by_round]
        peak = [max(phase.goodput_per_s for phase in phases) for phases in by_round]
        found[f"{NAME}:{METRIC}:{system}_{LOADS[-1]:g}x/{system}_peak"] = pairwise_ratio(over, peak)
    return found


def make_requests(folder: Path) -> list[RankRequest]:
    """Different ones, with skewed ids."""
    package = open_package(folder)
    manifest = package.manifest
    made = [
        random_request(
            manifest.inputs, manifest.bounds, model=manifest.name, candidates=_CANDIDATES,
            ids_per_bag=ids_per_bag(_MODEL), seed=seed,
        )
        for seed in range(_REQUESTS)
    ]  # fmt: skip
    return [check_request(package.card(), one.tensors, request_id=one.request_id) for one in made]


async def _rounds(
    ranker: RemoteRanker,
    requests: Sequence[RankRequest],
    configure: Callable[[WorkerKnobs], None],
    rounds: int,
    say: Say,
) -> dict[str, list[list[Phase]]]:
    capacity_per_s = await closed_loop_per_s(ranker, requests)
    say(f"{NAME}: a closed loop reaches {capacity_per_s:.0f}/s")
    taken: dict[str, list[list[Phase]]] = {system: [] for system in KNOBS}
    for number in range(rounds):
        for system, knobs in KNOBS.items():
            await asyncio.to_thread(configure, knobs)
            phases = []
            for load in LOADS:
                rate_per_s = load * capacity_per_s
                phases.append(await open_loop(ranker, requests, rate_per_s, seconds=_PHASE_S, seed=number))
                say(f"{NAME}: round {number + 1} of {rounds}: {system} {load:g}x: {phases[-1]}")
            taken[system].append(phases)
    return taken


async def closed_loop_per_s(ranker: RemoteRanker, requests: Sequence[RankRequest]) -> float:
    """What some callers reach that always wait for their answer, and give it all the time it needs."""
    until_s = time.monotonic() + _CLOSED_S
    done = 0

    async def call(number: int) -> None:
        nonlocal done
        while time.monotonic() < until_s:
            await ranker.rank(requests[number % len(requests)])
            number += 1
            done += 1

    await asyncio.gather(*(call(number * 3) for number in range(_CALLERS)))
    return done / _CLOSED_S


async def open_loop(
    ranker: RemoteRanker, requests: Sequence[RankRequest], rate_per_s: float, *, seconds: float, seed: int
) -> Phase:
    """One phase; the deadline of a request counts from the moment at which it was due to be sent."""
    chance = random.Random(seed)
    begin_s, due_s = time.monotonic(), 0.0
    asked: list[asyncio.Task[bool | None]] = []

    async def ask(request: RankRequest, deadline_s: float) -> bool | None:
        try:
            await ranker.rank(replace(request, deadline_s=deadline_s))
        except Busy:
            return None
        except RankError:
            return False
        return time.monotonic() <= deadline_s

    while (due_s := due_s + chance.expovariate(rate_per_s)) < seconds:
        await asyncio.sleep(max(0.0, begin_s + due_s - time.monotonic()))
        asked.append(asyncio.create_task(ask(chance.choice(requests), begin_s + due_s + LIMIT_MS / 1e3)))
    outcomes = [await task for task in asked]
    return Phase(
        offered_per_s=rate_per_s,
        goodput_per_s=outcomes.count(True) / seconds,
        refused=outcomes.count(None),
        late=outcomes.count(False),
    )


class _WorkerProcess:
    """A worker of `overload_worker`."""

    def __init__(self, folder: Path, role: str, secret: bytes, *addresses: str) -> None:
        """Waits until it listens. Raises `SystemFailed`."""
        command = [sys.executable, "-m", "plait_bench.disagg.overload_worker", str(folder), role, *addresses]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tell(secret.hex())

    def configure(self, knobs: WorkerKnobs) -> None:
        """Raises `SystemFailed`."""
        self._tell(json.dumps(asdict(knobs)))

    def end(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()

    def _tell(self, line: str) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(line + "\n")
        stdin.flush()
        if stdout.readline().strip() != "ok":
            raise SystemFailed("a worker process ended")


@contextmanager
def workers(folder: Path) -> Iterator[tuple[RemoteRanker, Callable[[WorkerKnobs], None]]]:
    """A CN and an HN, a client that is connected to them, and how their knobs are changed. Raises `SystemFailed`."""
    secret = new_secret()
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as sockets, ExitStack() as stack:
        front, hn = f"shm://{sockets}/front", f"shm://{sockets}/hn"
        started: list[_WorkerProcess] = []
        for role, *addresses in (("hn", hn), ("cn", front, hn)):
            started.append(_WorkerProcess(folder, role, secret, *addresses))
            stack.callback(started[-1].end)
        ranker = RemoteRanker(
            "model", lambda _: Link(replica="cn", channel=connect(front, secret=secret, options=FABRIC))
        )
        stack.callback(ranker.core.stop, drain_s=0.0)
        until_s = time.monotonic() + _START_S
        while ranker.core.ready() is not None:
            if time.monotonic() > until_s:
                raise SystemFailed(f"no worker: {ranker.core.ready()}")
            time.sleep(0.01)

        def configure(knobs: WorkerKnobs) -> None:
            for process in started:
                process.configure(knobs)

        yield ranker, configure


def _row(workload: str, system: str, values: Sequence[float]) -> Row:
    summary = summarise(values)
    return Row(
        system=system, workload=workload, metric=METRIC, unit=UNIT, value=summary.value,
        p20=summary.p20, p80=summary.p80, n=summary.n,
    )  # fmt: skip
