"""The overload benchmark: what counts as in time, and what is compared with what; the split's cost in process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from plait_bench.disagg import overload, split_cost
from plait_bench.disagg.goodput import LIMIT_MS
from plait_bench.disagg.overload import LOADS, LoadPhase, goodput_kept, open_loop
from plait_disagg.errors import Busy, DeadlinePassed
from plait_disagg.values import RankRequest
from support import ranking as kit


class Stub:
    """A ranker that refuses every third request, is late with the next one, and answers the others at once."""

    def __init__(self) -> None:
        self.left_s: list[float] = []

    async def rank(self, request: RankRequest) -> None:
        """As `Ranker.rank`, as far as it goes."""
        assert request.deadline_s is not None
        self.left_s.append(request.deadline_s - time.monotonic())
        if len(self.left_s) % 3 == 0:
            raise Busy("no")
        if len(self.left_s) % 3 == 1:
            raise DeadlinePassed("no")


def test_only_answers_in_time_are_good() -> None:
    """Refused and late ones are counted apart; every request has the limit as its deadline."""
    stub: Any = Stub()
    phase = asyncio.run(open_loop(stub, [kit.request(1)], 300.0, seconds=0.5, seed=1))
    assert phase.refused + phase.late + round(phase.goodput_per_s * 0.5) == len(stub.left_s) > 60
    assert min(phase.refused, phase.late, phase.goodput_per_s) > 0
    assert max(stub.left_s) <= LIMIT_MS / 1e3


def test_the_same_seed_offers_the_same_load() -> None:
    """Systems are compared on the same arrivals."""
    counts = []
    for _ in range(2):
        stub: Any = Stub()
        asyncio.run(open_loop(stub, [kit.request(1)], 200.0, seconds=0.3, seed=7))
        counts.append(len(stub.left_s))
    assert counts[0] == counts[1]


def test_overload_is_compared_with_the_systems_own_peak() -> None:
    """The peak is the best of all loads of a round; the last load is the overload."""

    def phases(*goodputs: float) -> list[LoadPhase]:
        return [LoadPhase(offered_per_s=1.0, goodput_per_s=it, refused=0, late=0) for it in goodputs]

    assert LOADS[-1] == 2.0
    found = goodput_kept({"a": [phases(50.0, 80.0, 100.0, 95.0)], "b": [phases(50.0, 80.0, 90.0, 9.0)]})
    assert {row.system: row.value for row in found} == {"a": pytest.approx(0.95), "b": pytest.approx(0.1)}
    assert {(row.workload, row.metric) for row in found} == {("overload-2x", "share_of_peak")}


def test_what_is_compared_differs_in_what_tames_overload_only() -> None:
    """Everything else is the default, on both sides."""
    tamed, plain = overload.KNOBS["plait_split"], overload.KNOBS["plait_split_fcfs"]
    assert (tamed.order, tamed.refuse_late, tamed.adapt_window) == ("deadline", True, True)
    assert (plain.order, plain.refuse_late, plain.adapt_window) == ("arrival", False, False)
    assert (tamed.threads, tamed.window, tamed.largest_batch_rows) == (
        plain.threads, plain.window, plain.largest_batch_rows,
    )  # fmt: skip


def test_a_block_is_the_median_of_sequential_requests() -> None:
    """One slow request in many does not move it."""

    class Once:
        asked = 0

        async def rank(self, _: RankRequest) -> None:
            self.asked += 1
            await asyncio.sleep(0.05 if self.asked == 3 else 0.0)

    once: Any = Once()
    assert asyncio.run(split_cost._block(once, [kit.request(1)])) < 20_000.0
    assert once.asked == split_cost._BLOCK
