"""What a live refresh costs: p99 with updates of 1 % of all rows per second, against none, and is every answer right?

The model is served whole, and cut in two, by processes of their own. Requests arrive at random (Poisson) at a share of
what a closed loop reaches; ``UPDATES_PER_S`` updates are published meanwhile, each of which writes rows of every table;
every tenth has new weights too. Phases with and without updates take turns. Afterwards every answer is compared with
the scores of the version that it names, computed here from the same updates one after the other.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from plait_bench.benchmark import ResultRow
from plait_bench.disagg.asking import arrivals, closed_loop_per_s, gc_paused, requests_of
from plait_bench.disagg.packages import packaged
from plait_bench.disagg.served import WorkerProcess, served
from plait_bench.disagg.told import PipedProcess
from plait_bench.errors import SystemFailed
from plait_bench.runner import Result
from plait_bench.summary import ValueSummary, pairwise_ratio, percentile
from plait_disagg.errors import RankError
from plait_disagg.package import Package, open_package
from plait_disagg.refresh.live_package import LivePackage
from plait_disagg.refresh.update import Update, UpdatedRows, read_update, write_update
from plait_disagg.values import RankRequest
from plait_disagg.workers.remote import RemoteRanker

__all__ = ["WORKLOAD", "result"]

WORKLOAD, METRIC = "refresh", "p99_ms"
ROWS_SHARE_PER_S = 0.01
UPDATES_PER_S = 10
_WEIGHTS_EVERY = 10
_MODEL, _SCALE, _CANDIDATES, _REQUESTS = "rm1", 0.125, 64, 32
PHASE_S = 8.0
_LOAD = 0.5
"""Of a closed loop's throughput."""
_CALLERS = 8
_RTOL, _ATOL = 1e-4, 1e-5
"""The company that a request has in its batch moves its scores by some 1e-6; a refresh by 1e-2 and more."""

_WATCHED = 4
"""Requests whose scores are followed from version to version."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAnswer:
    """What came of one request; ``scores`` None: it was lost."""

    request: int
    latency_s: float
    version: str = ""
    scores: torch.Tensor | None = None


def result(*, rounds: int, say: Say) -> Result:
    """p99 of both kinds of phases, round by round, and their ratio; answers that were wrong or lost; what was
    refreshed."""
    made: list[ResultRow] = []
    ratios: dict[str, ValueSummary] = {}
    original = packaged(_MODEL, _SCALE, say=say)
    for system, mode in (("plait", "whole"), ("plait_split", "split")):
        with tempfile.TemporaryDirectory(dir=original.parent, prefix=".refresh-") as scratch:
            package = open_package(linked_copy(original, Path(scratch) / "package"))
            updates = write_updates(package, Path(scratch), int(rounds * PHASE_S * UPDATES_PER_S), say=say)
            requests = requests_of(package, _MODEL, candidates=_CANDIDATES, count=_REQUESTS)
            with served(package, mode) as (ranker, workers), closing(Publisher(package, updates, workers)) as publisher:
                run = RefreshRun(ranker, requests, publisher)
                asyncio.run(run.rounds(rounds, partial(_say, say, system)))
            say(f"{system}: comparing {len(run.answers)} answers")
            wrong, step = wrong_answers(package, updates, requests, run.answers)
        made += _rows(system, run, wrong, step)
        still, refreshed = run.p99_ms
        ratios[f"{WORKLOAD}:{METRIC}:{system}_refreshed/{system}_still"] = pairwise_ratio(refreshed, still)
    return Result(rows=tuple(made), ratios=ratios, left_out={})


def _say(say: Say, system: str, text: str) -> None:
    say(f"{system}: {text}")


def linked_copy(original: Path, folder: Path) -> Path:
    """A package of one's own that shares the files, which nobody writes: updates go into its journal."""
    folder.mkdir()
    for path in original.iterdir():
        if path.is_file():
            os.link(path, folder / path.name)
    return folder


def write_updates(package: Package, scratch: Path, count: int, *, say: Say) -> list[Path]:
    """From the packaged version on, one after the other."""
    say(f"writing {count} updates")
    chance = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        found.append(scratch / f"update-{number}")
        write_update(found[-1], make_update(package, number, chance))
    return found


def make_update(package: Package, number: int, chance: torch.Generator) -> Update:
    """From version ``number + 1`` to the next: new rows of every table, spread like the old ones but ten times as
    large, and now and then new weights."""
    share = ROWS_SHARE_PER_S / UPDATES_PER_S
    new_rows = {}
    for table in package.tables.tables:
        ids = torch.unique(torch.randint(0, table.rows, (max(1, round(share * table.rows)),), generator=chance))
        new_rows[table.name] = UpdatedRows(ids=ids, rows=torch.randn(len(ids), table.dim, generator=chance))
    weights = {}
    if number % _WEIGHTS_EVERY == _WEIGHTS_EVERY - 1:
        weights = {
            name: old * (1.0 + 0.1 * torch.randn(old.shape, generator=chance))
            for name, old in package.constants.items()
        }
    return Update(
        model=package.manifest.name, base=str(number + 1), version=str(number + 2), rows=new_rows, constants=weights
    )


class Publisher:
    """Publishes updates one after the other, `UPDATES_PER_S` or as many as can be, from a process of its own."""

    def __init__(self, package: Package, updates: Sequence[Path], workers: Sequence[WorkerProcess]) -> None:
        """Waits until it has opened the package. Raises `SystemFailed`."""
        pipes = [(worker.role, *worker.pipes) for worker in workers]
        self._process = PipedProcess(
            "publisher",
            "plait_bench.disagg.publisher",
            *(f"{role}:{hears}:{says}" for role, hears, says in pipes),
            pass_fds=[pipe for _, *both in pipes for pipe in both],
        )
        if self._process.tell(str(package.folder)) is not None:
            raise SystemFailed("the publisher did not start")
        self._left = list(updates)
        self.published, self.seconds = 0, 0.0

    def until(self, stop: threading.Event) -> None:
        """Goes on where it stopped last. Raises `SystemFailed`."""
        began_s = due_s = time.monotonic()
        while self._left and not stop.wait(max(0.0, due_s - time.monotonic())):
            if (failed := self._process.tell(str(self._left.pop(0)))) is not None:
                raise failed
            self.published += 1
            due_s += 1.0 / UPDATES_PER_S
        self.seconds += time.monotonic() - began_s

    def close(self) -> None:
        """Ends the process."""
        self._process.end()


class RefreshRun:
    """One system under load: the answers of every phase, without updates and with."""

    def __init__(
        self,
        ranker: RemoteRanker,
        requests: Sequence[RankRequest],
        publisher: Publisher,
        *,
        phase_s: float = PHASE_S,
    ) -> None:
        self._ranker, self._requests, self._phase_s = ranker, requests, phase_s
        self.publisher = publisher
        self.still: list[list[LoadAnswer]] = []
        self.refreshed: list[list[LoadAnswer]] = []

    @property
    def answers(self) -> list[LoadAnswer]:
        """Of all phases."""
        return [answer for phase in (*self.still, *self.refreshed) for answer in phase]

    @property
    def p99_ms(self) -> tuple[list[float], list[float]]:
        """By round: without updates, and with."""
        return [p99_ms(phase) for phase in self.still], [p99_ms(phase) for phase in self.refreshed]

    async def rounds(self, count: int, say: Say) -> None:
        """Phases in turn, the same arrivals in both of a round."""
        rate_per_s = _LOAD * await closed_loop_per_s(
            self._ranker, self._requests, callers=_CALLERS, seconds=self._phase_s / 4
        )
        say(f"{rate_per_s:.0f} requests/s")
        for number in range(count):
            self.still.append(await self._phase(rate_per_s, number))
            stop = threading.Event()
            publishing = asyncio.create_task(asyncio.to_thread(self.publisher.until, stop))
            self.refreshed.append(await self._phase(rate_per_s, number))
            stop.set()
            await publishing
            still, refreshed = self.p99_ms
            say(f"round {number + 1} of {count}: p99 {still[-1]:.2f} ms still, {refreshed[-1]:.2f} ms refreshed")

    async def _phase(self, rate_per_s: float, seed: int) -> list[LoadAnswer]:
        with gc_paused():
            return await open_loop(self._ranker, self._requests, rate_per_s, self._phase_s, seed=seed)


async def open_loop(
    ranker: RemoteRanker, requests: Sequence[RankRequest], rate_per_s: float, seconds: float, *, seed: int
) -> list[LoadAnswer]:
    """One phase. Latency counts from the moment at which a request was due."""
    chance = random.Random(seed)

    async def ask(number: int, due_s: float) -> LoadAnswer:
        try:
            answer = await ranker.rank(requests[number])
        except RankError:
            return LoadAnswer(request=number, latency_s=time.monotonic() - due_s)
        latency_s = time.monotonic() - due_s
        scores = next(iter(answer.outputs.values()))
        return LoadAnswer(request=number, latency_s=latency_s, version=answer.version, scores=scores)

    asked = [
        asyncio.create_task(ask(chance.randrange(len(requests)), due_s))
        async for due_s in arrivals(rate_per_s, seconds, chance)
    ]
    return [await task for task in asked]


def wrong_answers(
    package: Package, updates: Sequence[Path], requests: Sequence[RankRequest], answers: Sequence[LoadAnswer]
) -> tuple[int, float]:
    """How many answers are not the scores of the version that they name; and by how much a request's scores change
    from one version to the next (the largest change; median), which says whether a wrong one would be seen.

    Goes through the versions again, from the packaged one, with the updates themselves and no journal.
    """
    live = LivePackage(package, sparse=True, dense=True)
    by_version: dict[str, list[LoadAnswer]] = {}
    for answer in answers:
        if answer.scores is not None:
            by_version.setdefault(answer.version, []).append(answer)
    wrong, steps = 0, []
    watched = {number: _scores(live, requests[number]) for number in range(min(_WATCHED, len(requests)))}
    for update in (None, *updates):
        if update is not None:
            change = live.stage(read_update(update))
            change.write()
            live.adopt(change)
            before, watched = watched, {number: _scores(live, requests[number]) for number in watched}
            steps += [float((watched[number] - old).abs().max()) for number, old in before.items()]
        mine = by_version.pop(live.version, [])
        expected = {number: _scores(live, requests[number]) for number in {answer.request for answer in mine}}
        for answer in mine:
            assert answer.scores is not None
            wrong += not torch.allclose(answer.scores, expected[answer.request], rtol=_RTOL, atol=_ATOL)
    wrong += sum(map(len, by_version.values()))  # of versions that there never were
    return wrong, percentile(steps, 0.5) if steps else 0.0


def _scores(live: LivePackage, request: RankRequest) -> torch.Tensor:
    assert live.sparse is not None
    outputs = live.dense[live.dense_version].run(live.sparse.run([request]), [request.candidates])
    return next(iter(outputs.values())).clone()


def p99_ms(phase: Sequence[LoadAnswer]) -> float:
    """Of one phase."""
    return 1e3 * percentile([answer.latency_s for answer in phase], 0.99)


def _rows(system: str, run: RefreshRun, wrong: int, step: float) -> list[ResultRow]:
    count = len(run.answers)
    lost = sum(answer.scores is None for answer in run.answers)
    updates_per_s = run.publisher.published / run.publisher.seconds
    made = [
        ResultRow.of(values, system=f"{system}_{name}", workload=WORKLOAD, metric=METRIC, unit="ms")
        for name, values in zip(("still", "refreshed"), run.p99_ms, strict=True)
    ]
    counted = [
        ("mixed_version_answers", "answers", float(wrong), count),
        ("lost_requests", "requests", float(lost), count),
        ("score_change_per_version", "score", step, count),
        ("rows_refreshed_per_s", "share of all rows/s", ROWS_SHARE_PER_S * updates_per_s / UPDATES_PER_S, 1),
    ]
    return made + [
        ResultRow(
            system=f"{system}_refreshed", workload=WORKLOAD, metric=metric, unit=unit, value=value,
            p20=value, p80=value, n=n,
        )
        for metric, unit, value, n in counted
    ]  # fmt: skip
