"""One process of the generator: it prepares, waits for the common start, sends, records, and reports its results.

The garbage collector is off while load runs: a full collection of a process that holds a million requests stops it
for tens of milliseconds, which would read as server latency. Nothing on the path of a request creates reference
cycles.
"""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvloop

from plait_loadtest.errors import LoadtestError
from plait_loadtest.failures import MEMORY, FailureLog
from plait_loadtest.plan import Share
from plait_loadtest.run.ledger import Ledger
from plait_loadtest.run.pace import BUDGET_BYTES, ClosedLoop, OpenLoop, RequestFeed, first_connections
from plait_loadtest.run.processes import ignore_ending
from plait_loadtest.values import Records, RequestCounts, RequestOutcome
from plait_loadtest.wire.answers import judge_of
from plait_loadtest.wire.dial import Dialler, RequestWriter, place_of
from plait_loadtest.wire.pool import ConnectionPool

READY, STOP = "ready", "stop"
"""Messages on the pipe: the worker sends "ready"; it then receives an int (the start, perf_counter_ns) and possibly
"stop"."""

_TELL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress(RequestCounts):
    """The progress of a worker. `recent_ns`: latencies of requests that ended last."""

    recent_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """The result of a worker: its records as bytes of `RECORD`, what their `why` counts, and the resources used.
    `limits`: how many requests each held up."""

    records: bytes
    whys: tuple[str, ...]
    cpu_s: float
    reconnects: int
    limits: Mapping[str, int]


def main(share: Share, pipe: Pipe) -> None:
    """Run a worker process. It ends when its results are on the pipe, or when the pipe breaks."""
    ignore_ending()
    try:
        Worker(share, pipe).run()
    except LoadtestError as error:
        pipe.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the coordinator is gone, and with it whoever wanted the results


class Worker:
    """One process of the generator; see the module docstring."""

    def __init__(self, share: Share, pipe: Pipe) -> None:
        self._share = share
        self._pipe = pipe
        self._place = place_of(share.scenario.target.url)
        self._judge = judge_of(share.scenario)
        self._failures = FailureLog(share.scenario)
        self._is_stopped = False
        indices = iter(range(share.rank, share.rank + len(share.scheduled_ns) * share.processes, share.processes))
        self._requests = RequestFeed(
            share.mix,
            RequestWriter(self._place, share.scenario.target.headers),
            indices if share.callers == 0 else count(share.rank, share.processes),
            budget_bytes=BUDGET_BYTES // share.beside,
        )

    def run(self) -> None:
        """Do all the work. Raises `LoadtestError` if a request cannot be built, OSError if the pipe breaks."""
        _raise_file_limit()
        cpu_s = time.process_time()
        if self._share.callers == 0:
            self._requests.fill(self._pipe.poll)
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            self._pipe.send(READY)
            said = self._pipe.recv()
            start_ns = said if isinstance(said, int) else time.perf_counter_ns()
            ledger, pool = uvloop.run(self._load(start_ns, is_stopped=said == STOP))
        finally:
            gc.enable()
            gc.unfreeze()
        self._pipe.send(self._left(ledger, start_ns, time.process_time() - cpu_s, pool))

    async def _load(self, start_ns: int, *, is_stopped: bool) -> tuple[Ledger, ConnectionPool]:
        share = self._share
        loop = asyncio.get_running_loop()
        ledger = Ledger(self._judge, self._failures, (share.scheduled_ns + start_ns).tolist(), self._asked)
        pace: OpenLoop | ClosedLoop
        if share.callers:
            pace = ClosedLoop(ledger, self._requests, share, start_ns=start_ns)
        else:
            pace = OpenLoop(ledger, self._requests, share.cancelled.tobytes())
        dialler = Dialler(self._place, share.scenario.target, turn=share.rank)
        pool = ConnectionPool(
            dialler.dial, share.scenario, pace.ended, room=share.room, keeps_body=self._judge.keeps_body
        )
        dialler.on_addresses = pool.spread
        broken: list[str] = []

        def on_bug(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if isinstance(context.get("exception"), MemoryError):
                pool.limits[MEMORY] += 1
            else:
                broken.append(f"{context['message']}: {context.get('exception')!r}")
            pace.finished.set()

        loop.set_exception_handler(on_bug)
        if not is_stopped:
            pool.open_ahead(share.callers or first_connections(ledger.scheduled_ns))
            pace.start(pool)
            await self._until_over(pace, pool, ledger, self._end_ns(start_ns))
        pace.stop()
        self._is_stopped = is_stopped or self._pipe.poll(0)  # else the drain time is over
        pool.close()
        if broken:
            raise RuntimeError(broken[0])  # our own mistake: better no numbers than wrong ones
        return ledger, pool

    async def _until_over(
        self, pace: OpenLoop | ClosedLoop, pool: ConnectionPool, ledger: Ledger, end_ns: float
    ) -> None:
        """Wait until all ended, the drain time is over, or the coordinator says stop; report progress meanwhile."""
        while not pace.finished.is_set() and not self._pipe.poll(0):
            left_s = (end_ns - time.perf_counter_ns()) / 1e9
            if left_s <= 0:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(pace.finished.wait(), min(_TELL_S, left_s))
            self._tell(pace, pool, ledger)

    def _tell(self, pace: OpenLoop | ClosedLoop, pool: ConnectionPool, ledger: Ledger) -> None:
        recent_ns = tuple(ledger.recent)
        ledger.recent.clear()
        progress = WorkerProgress(
            handed=pace.handed,
            done=ledger.done,
            ok=ledger.counts[RequestOutcome.OK],
            errors=ledger.errors,
            in_flight=pool.in_flight,
            waiting=pool.waiting,
            recent_ns=recent_ns,
        )
        self._pipe.send(progress)

    def _end_ns(self, start_ns: int) -> float:
        """Return when to stop waiting for replies; callers with a count end by themselves."""
        share = self._share
        if share.callers and share.count is not None:
            return math.inf
        closed_ns = int((share.scenario.warm_up_s + share.scenario.duration_s) * 1e9)
        last_ns = int(share.scheduled_ns[-1]) if len(share.scheduled_ns) else closed_ns
        return start_ns + last_ns + int(share.scenario.limits.drain_s * 1e9)

    def _left(self, ledger: Ledger, start_ns: int, cpu_s: float, pool: ConnectionPool) -> WorkerResult:
        records = records_of(ledger, self._share, start_ns)
        if not self._is_stopped:
            never_ended = records["outcome"] == RequestOutcome.INTERRUPTED
            records["outcome"][never_ended] = RequestOutcome.UNFINISHED
            records["why"][never_ended] = self._failures.number(
                f"limits.drain_s ({self._share.scenario.limits.drain_s:g} s) was over"
            )
        return WorkerResult(
            records=records.tobytes(),
            whys=tuple(self._failures.texts),
            cpu_s=cpu_s,
            reconnects=pool.reconnects,
            limits=dict(pool.limits),
        )

    def _asked(self, slot: int) -> int:
        return self._share.mix.asked(self._share.rank + slot * self._share.processes)


def records_of(ledger: Ledger, share: Share, start_ns: int) -> Records:
    """Return a worker's records, times counted from `start_ns`."""
    rank, processes = share.rank, share.processes
    kinds = [share.mix.kind(rank + slot * processes) for slot in range(len(ledger.scheduled_ns))]
    return ledger.records(rank=rank, processes=processes, start_ns=start_ns, kinds=kinds, warm_up=share.warm_up)


def _raise_file_limit() -> None:
    """Allow as many sockets as the system permits this user: the usual soft limit is 1024 files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
