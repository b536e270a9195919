"""A worker and its queue in virtual time: Poisson arrivals with deadlines, the real policy, batch times on a line."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from plait_disagg.errors import Busy, RankError
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.queue.order import WaitQueue
from plait_disagg.queue.pace import Pace


@dataclass(eq=False, kw_only=True)
class QueuedItem:
    """An item that remembers how it ended."""

    rows: int = 1
    alone: bool = False
    gone: bool = False
    came_s: float = 0.0
    due_s: float | None = None
    error: RankError | None = None
    done_s: float | None = None
    request_ids: tuple[str, ...] = ()

    @property
    def lost_s(self) -> float | None:
        """See Item."""
        return self.due_s

    def fail(self, error: RankError) -> None:
        """See Item."""
        self.error = error


@dataclass(kw_only=True)
class QueueRun:
    """What came of a load."""

    pieces: list[QueuedItem]
    seconds: float
    refused: int = 0
    batches: list[int] = field(default_factory=list)

    @property
    def goodput_per_s(self) -> float:
        """Pieces that were done by their deadline, per second of arrivals."""
        good = sum(it.done_s is not None and it.due_s is not None and it.done_s <= it.due_s for it in self.pieces)
        return good / self.seconds


def run_queue(
    knobs: WorkerKnobs,
    *,
    rate_per_s: float,
    deadline_s: float,
    fixed_s: float,
    row_s: float,
    rows: int = 1,
    seconds: float = 4.0,
    noise: float = 0.0,
    later_s: float = 0.0,
    seed: int = 0,
    pace: Pace | None = None,
) -> QueueRun:
    """Serves ``seconds`` of arrivals; a batch takes ``fixed_s + rows * row_s``, times 1 to 1 + ``noise``. Answers
    are there up to ``later_s`` after it, which nobody forecasts."""
    chance = random.Random(seed)
    pace = pace or Pace()
    waiting: WaitQueue[QueuedItem] = WaitQueue(knobs, pace)
    arrivals: list[QueuedItem] = []
    moment_s = chance.expovariate(rate_per_s)
    while moment_s < seconds:
        arrivals.append(QueuedItem(rows=rows, came_s=moment_s, due_s=moment_s + deadline_s))
        moment_s += chance.expovariate(rate_per_s)
    run = QueueRun(pieces=arrivals, seconds=seconds)
    coming = iter([*arrivals, None])
    nxt = next(coming)
    now_s, batch, began_s = 0.0, [], 0.0
    while nxt is not None or batch or len(waiting):
        if not batch and len(waiting):
            batch, began_s = waiting.take(now_s).batch, now_s
            if batch:
                total = sum(it.rows for it in batch)
                run.batches.append(total)
                waiting.busy_until_s = now_s + pace.batch_s(total)
                ends_s = now_s + (fixed_s + total * row_s) * (1 + noise * chance.random())
            continue
        if batch and (nxt is None or ends_s <= nxt.came_s):
            now_s = ends_s
            pace.saw_batch(sum(it.rows for it in batch), now_s - began_s)
            for it in batch:
                it.done_s = now_s + later_s * chance.random()
                if it.due_s is not None:
                    pace.saw_end(in_time=it.done_s <= it.due_s)
            batch, waiting.busy_until_s = [], 0.0
            continue
        if nxt is None:
            break
        now_s = nxt.came_s
        try:
            waiting.check(nxt, now_s)
            waiting.add(nxt)
        except Busy:
            run.refused += 1
        nxt = next(coming)
    return run
