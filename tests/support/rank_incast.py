"""Many CNs that send to one HN, in virtual time, with the real window policy."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass

from plait_disagg.queue.window import Window


@dataclass(frozen=True, kw_only=True)
class Incast:
    """What came of it once it had settled."""

    batches_per_s: float
    queued_s: float
    sizes: tuple[int, ...]


class _Simulation:
    """Every CN has a batch ready whenever its window has room, made in no time. The HN computes one batch after the
    other."""

    def __init__(self, windows: list[Window], *, dense_s: float, wire_s: float, seed: int) -> None:
        self.windows = windows
        self.open = [0] * len(windows)
        self.dense_s, self.wire_s = dense_s, wire_s
        self.chance = random.Random(seed)
        self.free_s = 0.0
        self.waits: list[tuple[float, float]] = []
        self._events: list[tuple[float, int, int, float, float, float]] = []
        self._numbers = itertools.count()

    def send(self, cn: int, now_s: float) -> None:
        while self.open[cn] < self.windows[cn].size:
            self.open[cn] += 1
            came_s = now_s + self.wire_s * (1.0 + self.chance.random())
            heapq.heappush(self._events, (came_s, next(self._numbers), cn, now_s, -1.0, 0.0))

    def run(self, seconds: float) -> None:
        for cn in range(len(self.windows)):
            self.send(cn, self.chance.random() * self.dense_s)
        while self._events and self._events[0][0] < seconds:
            now_s, _, cn, sent_s, queued_s, dense_s = heapq.heappop(self._events)
            if queued_s < 0:
                self._arrive(cn, now_s, sent_s)
            else:
                self.windows[cn].answered(
                    made_s=0.0, away_s=now_s - sent_s, queued_s=queued_s, dense_s=dense_s, open_now=self.open[cn]
                )
                self.open[cn] -= 1
                self.send(cn, now_s)

    def _arrive(self, cn: int, now_s: float, sent_s: float) -> None:
        begin_s, dense_s = max(now_s, self.free_s), self.dense_s * (1.0 + 0.2 * self.chance.random())
        self.free_s = begin_s + dense_s
        self.waits.append((begin_s, begin_s - now_s))
        answered_s = self.free_s + self.wire_s
        heapq.heappush(self._events, (answered_s, next(self._numbers), cn, sent_s, begin_s - now_s, dense_s))


def run_incast(
    cns: int, *, most: int, adapts: bool, dense_s: float = 1e-3, wire_s: float = 3e-4, seconds: float = 1.5
) -> Incast:
    """``cns`` CNs for ``seconds``, of which the last two thirds are counted."""
    simulation = _Simulation(
        [Window(max_size=most, adapts=adapts) for _ in range(cns)], dense_s=dense_s, wire_s=wire_s, seed=1
    )
    simulation.run(seconds)
    counted = [wait_s for begin_s, wait_s in simulation.waits if begin_s > seconds / 3]
    return Incast(
        batches_per_s=len(counted) / (simulation.free_s - seconds / 3),
        queued_s=sum(counted) / len(counted),
        sizes=tuple(window.size for window in simulation.windows),
    )
