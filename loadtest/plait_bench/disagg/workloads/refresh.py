"""The cost of a live refresh: p99 with updates of 1 % of all rows per second against none, and is every answer right?

The model is served whole, and cut in two, by processes of their own. Requests arrive at random (Poisson) at a share
of a closed loop's throughput; meanwhile `UPDATES_PER_S` updates per second are published, each of which writes rows
of every table; every tenth has new weights too. A round is a phase without updates and one with them, on the same
arrivals. Afterwards every answer is compared with the scores of the version that it names, computed here from the
same updates.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plait_bench.benchmark import Metric, Reading, ResultRow, Say, Subject, Workload
from plait_bench.disagg.load.asking import arrivals, closed_loop_per_s, gc_paused, requests_of
from plait_bench.disagg.load.packages import packaged
from plait_bench.disagg.systems.served import WorkerProcess, served
from plait_bench.disagg.systems.worker_pipes import PipedProcess
from plait_bench.errors import SystemFailed
from plait_bench.summary import percentile
from plait_disagg.errors import RankError
from plait_disagg.package import Package, open_package
from plait_disagg.refresh.live_package import LivePackage
from plait_disagg.refresh.update import Update, UpdatedRows, read_update, write_update
from plait_disagg.values import RankRequest
from plait_disagg.workers.remote import RemoteRanker

__all__ = ["LoadAnswer", "Publisher", "Refresh", "RefreshRun", "wrong_answers"]

WORKLOAD, METRIC = "refresh", "p99_ms"
ROWS_SHARE_PER_S = 0.01
UPDATES_PER_S = 10
_WEIGHTS_EVERY = 10
_MODEL, _SCALE, _CANDIDATES, _REQUESTS = "rm1", 0.125, 64, 32
PHASE_S = 8.0
_LOAD = 0.5
"""The offered rate as a share of a closed loop's throughput."""
_CALLERS = 8
_RTOL, _ATOL = 1e-4, 1e-5
"""The other requests in its batch change a request's scores by some 1e-6; a refresh changes them by 1e-2 and more."""

_WATCHED = 4
"""The number of requests whose scores are followed from version to version."""


class Refresh(Workload):
    """One system, `whole` or `split`: its phases without updates are compared with those with them."""

    name = WORKLOAD
    metrics: Mapping[str, Metric] = {METRIC: Metric(unit="ms", better="lower")}

    def __init__(self, system: str, mode: str) -> None:
        self._system, self._mode = system, mode
        self.systems = (f"{system}_still", f"{system}_refreshed")
        self.ours = self.systems[1]
        self.pairs = ((self.systems[1], self.systems[0]),)
        self._written = 0

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Run the workers and the publisher."""
        self._say = say
        original = packaged(_MODEL, _SCALE, say=say)
        with tempfile.TemporaryDirectory(dir=original.parent, prefix=".refresh-") as scratch:
            self._scratch = Path(scratch)
            self._package = open_package(linked_copy(original, self._scratch / "package"))
            self._updates = make_updates(self._package)
            self._requests = requests_of(self._package, _MODEL, candidates=_CANDIDATES, count=_REQUESTS)
            with (
                served(self._package, self._mode) as (ranker, workers),
                closing(Publisher(self._package, [], workers)) as publisher,
                closing(RefreshRun(ranker, self._requests, publisher)) as self._run,
            ):
                say(f"{self._system}: {self._run.find_rate():.0f} requests/s")
                yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the phases of one kind; the workers are already running."""
        yield _Phase(self, refreshed=system == self.systems[1])

    def phase_ms(self, number: int, *, refreshed: bool) -> float:
        """Run a phase of a round and return its p99. The round's updates are written before its first phase."""
        if self._written < number:
            self._run.publisher.add(self._written_updates(int(PHASE_S * UPDATES_PER_S)))
            self._written = number
        return p99_ms(self._run.phase(number, refreshed=refreshed))

    def _written_updates(self, count: int) -> list[Path]:
        found = []
        for _ in range(count):
            update = next(self._updates)
            found.append(self._scratch / f"update-{update.version}")
            write_update(found[-1], update)
        return found

    def conclude(self) -> Sequence[ResultRow]:
        """Count the wrong and lost answers, and the refreshed rows."""
        answers, publisher = self._run.answers, self._run.publisher
        self._say(f"{self._system}: comparing {len(answers)} answers")
        wrong, step = wrong_answers(self._package, publisher.given, self._requests, answers)
        lost = sum(answer.scores is None for answer in answers)
        refreshed_per_s = ROWS_SHARE_PER_S * publisher.published / publisher.seconds / UPDATES_PER_S
        counted = [
            ("mixed_version_answers", "answers", float(wrong), len(answers)),
            ("lost_requests", "requests", float(lost), len(answers)),
            ("score_change_per_version", "score", step, len(answers)),
            ("rows_refreshed_per_s", "share of all rows/s", refreshed_per_s, 1),
        ]
        return [
            ResultRow(
                system=self.systems[1], workload=WORKLOAD, metric=metric, unit=unit, value=value,
                p20=value, p80=value, n=n,
            )
            for metric, unit, value, n in counted
        ]  # fmt: skip


@dataclass(frozen=True)
class _Phase:
    """Implements `Subject`."""

    workload: Refresh
    refreshed: bool

    def warm_up(self) -> None:
        """Do nothing: the closed loop has warmed the workers up."""

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        return [Reading(metric=METRIC, value=self.workload.phase_ms(number, refreshed=self.refreshed))]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAnswer:
    """The result of one request; `scores` is None if it was lost."""

    request: int
    latency_s: float
    version: str = ""
    scores: torch.Tensor | None = None


def linked_copy(original: Path, folder: Path) -> Path:
    """Make a separate package that shares the original's files, which nobody writes: updates go into its own
    journal."""
    folder.mkdir()
    for path in original.iterdir():
        if path.is_file():
            os.link(path, folder / path.name)
    return folder


def make_updates(package: Package) -> Iterator[Update]:
    """Yield updates from the packaged version on, one after the other, without end."""
    rng = torch.Generator().manual_seed(1)
    number = 0
    while True:
        yield make_update(package, number, rng)
        number += 1


def make_update(package: Package, number: int, rng: torch.Generator) -> Update:
    """Make the update from version `number + 1` to the next: new rows of every table, distributed like the old ones but
    ten times as large, and every `_WEIGHTS_EVERY` updates new weights."""
    share = ROWS_SHARE_PER_S / UPDATES_PER_S
    new_rows = {}
    for table in package.tables.tables:
        ids = torch.unique(torch.randint(0, table.rows, (max(1, round(share * table.rows)),), generator=rng))
        new_rows[table.name] = UpdatedRows(ids=ids, rows=torch.randn(len(ids), table.dim, generator=rng))
    weights = {}
    if number % _WEIGHTS_EVERY == _WEIGHTS_EVERY - 1:
        weights = {
            name: old * (1.0 + 0.1 * torch.randn(old.shape, generator=rng)) for name, old in package.constants.items()
        }
    return Update(
        model=package.manifest.name, base=str(number + 1), version=str(number + 2), rows=new_rows, constants=weights
    )


class Publisher:
    """Publishes updates one after the other from a process of its own: `UPDATES_PER_S`, or as many as possible."""

    def __init__(self, package: Package, updates: Sequence[Path], workers: Sequence[WorkerProcess]) -> None:
        """Start the process and wait until it has opened the package. Raises `SystemFailed`."""
        pipes = [(worker.role, *worker.pipes) for worker in workers]
        self._process = PipedProcess(
            "publisher",
            "plait_bench.disagg.systems.publisher",
            *(f"{role}:{hears}:{says}" for role, hears, says in pipes),
            pass_fds=[pipe for _, *both in pipes for pipe in both],
        )
        if self._process.tell(str(package.folder)) is not None:
            raise SystemFailed("the publisher did not start")
        self.given: list[Path] = []
        self._left: list[Path] = []
        self.add(updates)
        self.published, self.seconds = 0, 0.0

    def add(self, updates: Sequence[Path]) -> None:
        """Queue more updates."""
        self.given += updates
        self._left += updates

    def until(self, stop: threading.Event) -> None:
        """Publish until `stop` is set, from where the last call stopped. Raises `SystemFailed`."""
        began_s = due_s = time.monotonic()
        while self._left and not stop.wait(max(0.0, due_s - time.monotonic())):
            if (failed := self._process.tell(str(self._left.pop(0)))) is not None:
                raise failed
            self.published += 1
            due_s += 1.0 / UPDATES_PER_S
        self.seconds += time.monotonic() - began_s

    def close(self) -> None:
        """Stop the process."""
        self._process.end()


class RefreshRun:
    """One system under load: the answers of every phase, without and with updates."""

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
        self._runner = asyncio.Runner()
        self._rate_per_s = 0.0

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()

    @property
    def answers(self) -> list[LoadAnswer]:
        """The answers of all phases."""
        return [answer for phase in (*self.still, *self.refreshed) for answer in phase]

    def find_rate(self) -> float:
        """Run a closed loop and return the rate of the phases, a share of its throughput, in requests per second."""
        closed = closed_loop_per_s(self._ranker, self._requests, callers=_CALLERS, seconds=self._phase_s / 4)
        self._rate_per_s = _LOAD * self._runner.run(closed)
        return self._rate_per_s

    def phase(self, seed: int, *, refreshed: bool) -> list[LoadAnswer]:
        """Run one phase; equal seeds give equal arrivals."""
        asking = open_loop(self._ranker, self._requests, self._rate_per_s, self._phase_s, seed=seed)
        with gc_paused():
            answers = self._runner.run(self._with_updates(asking) if refreshed else asking)
        (self.refreshed if refreshed else self.still).append(answers)
        return answers

    async def _with_updates(self, asking: Coroutine[Any, Any, list[LoadAnswer]]) -> list[LoadAnswer]:
        stop = threading.Event()
        publishing = asyncio.create_task(asyncio.to_thread(self.publisher.until, stop))
        try:
            return await asking
        finally:
            stop.set()
            await publishing


async def open_loop(
    ranker: RemoteRanker, requests: Sequence[RankRequest], rate_per_s: float, seconds: float, *, seed: int
) -> list[LoadAnswer]:
    """Run one phase. Latency counts from the time at which a request was due."""
    rng = random.Random(seed)

    async def ask(number: int, due_s: float) -> LoadAnswer:
        try:
            answer = await ranker.rank(requests[number])
        except RankError:
            return LoadAnswer(request=number, latency_s=time.monotonic() - due_s)
        latency_s = time.monotonic() - due_s
        scores = next(iter(answer.outputs.values()))
        return LoadAnswer(request=number, latency_s=latency_s, version=answer.version, scores=scores)

    asked = [
        asyncio.create_task(ask(rng.randrange(len(requests)), due_s))
        async for due_s in arrivals(rate_per_s, seconds, rng)
    ]
    return [await task for task in asked]


def wrong_answers(
    package: Package, updates: Sequence[Path], requests: Sequence[RankRequest], answers: Sequence[LoadAnswer]
) -> tuple[int, float]:
    """Count the answers that differ from the scores of the version that they name. Also return by how much a request's
    scores change from one version to the next (the largest change; median), which shows whether a wrong answer would
    be noticed.

    Replays the versions from the packaged one, with the updates themselves and no journal.
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
    """Compute the p99 of one phase."""
    return 1e3 * percentile([answer.latency_s for answer in phase], 0.99)
