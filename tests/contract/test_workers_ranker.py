"""What every ranker promises: whole and cut in two, in this process and over each fabric."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator

import pytest
import torch

from fakes import ranking_model as kit
from plait_disagg.errors import BadInput, Busy, DeadlinePassed, RankError, WorkerUnavailable
from plait_disagg.protocols import Ranker
from plait_disagg.queue.jobs import Core
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.values import RankAnswer
from support.rank_fabric import Rig
from support.waiting import until

KINDS = ("whole", "cn", "inproc split", "shm whole", "tcp split")

KNOBS = WorkerKnobs(largest_waiting=8, largest_batch_rows=64)


class Stand:
    """A ranker of one kind, and the halves behind it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        scheme = kind.partition(" ")[0]
        self.rig = Rig(scheme if scheme in ("shm", "tcp") else "inproc")  # type: ignore[arg-type]
        self.sparse, self.dense = kit.FakeSparse(), kit.FakeDense()

    async def ranker(self, knobs: WorkerKnobs = KNOBS) -> Ranker:
        """Ready to rank."""
        self.core: Core
        if "whole" in self.kind:
            core = self.core = self.rig.whole(self.sparse, self.dense, knobs)
            if self.kind == "whole":
                return await self.rig.local(core)
            self.rig.front(core)
            return await self.rig.ranker()
        self.rig.hn(self.dense)
        cn = self.core = self.rig.cn(self.sparse, knobs=knobs)
        local = await self.rig.local(cn)
        if self.kind == "cn":
            return local
        self.rig.front(cn)
        return await self.rig.ranker()

    async def stuck(self, ranker: Ranker) -> asyncio.Future[RankAnswer]:
        """A request that the sparse half has and does not finish while its gate is not set."""
        self.sparse.gate.clear()
        asked = asyncio.ensure_future(ranker.rank(kit.request(0)))
        await until(lambda: self.sparse.entered > 0)
        return asked

    async def waiting(self, count: int) -> None:
        """Returns when so many requests wait behind it."""
        await until(lambda: self.core.metrics()["waiting"] == count)


@pytest.fixture(params=KINDS)
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    """One of each kind."""
    made = Stand(request.param)
    with made.rig:
        yield made


async def test_answers_are_the_models(stand: Stand) -> None:
    """One request has the halves' own bits; many at once are right to rounding; the card is the model's; what was
    ranked is counted."""
    ranker = await stand.ranker()
    assert ranker.card == kit.CARD
    assert await ranker.ready() is None
    request = kit.request(1, 70)
    answer = await ranker.rank(request)
    assert all(torch.equal(answer.outputs[name], value) for name, value in kit.expected(request).items())
    assert (answer.bytes_crossed > 0) == (stand.kind == "cn" or "split" in stand.kind)
    timings = answer.timings
    assert min(timings.queued_ms, timings.lookup_ms, timings.wire_ms, timings.dense_ms) >= 0
    metrics = ranker.metrics()
    assert max(metrics.get("requests_total", 0), metrics.get("sent_total", 0)) == 1
    requests = [kit.request(seed, 1 + seed % 5) for seed in range(6)]
    for request, answer in zip(requests, await asyncio.gather(*map(ranker.rank, requests)), strict=True):
        for name, value in kit.expected(request).items():
            torch.testing.assert_close(answer.outputs[name], value)


async def test_a_fault_in_either_half_hurts_one_request(stand: Stand) -> None:
    """Its batch mates are answered; it gets an error that tells nothing of the inside; the ranker lives on."""
    stand.sparse.poison, stand.dense.poison = frozenset({77}), 0.5
    ranker = await stand.ranker()
    changes = [{}, {"item": torch.tensor([1, 77, 2])}, {}, {"price": torch.tensor([[0.1], [0.5], [0.2]])}, {}]
    requests = [kit.request(seed, changes=change) for seed, change in enumerate(changes)]
    outcomes = await asyncio.gather(*map(ranker.rank, requests), return_exceptions=True)
    for request, outcome, change in zip(requests, outcomes, changes, strict=True):
        if change:
            assert isinstance(outcome, RankError)
            assert "poison" not in outcome.message
        else:
            assert not isinstance(outcome, BaseException)
            torch.testing.assert_close(outcome.outputs["score"], kit.expected(request)["score"])
    assert (await ranker.rank(kit.request(9))).outputs["score"].shape == (3,)


async def test_a_passed_deadline_is_told_in_time_and_costs_no_work(stand: Stand) -> None:
    """Also while the worker is stuck; what waited in vain is not computed."""
    ranker = await stand.ranker()
    stuck = await stand.stuck(ranker)
    with pytest.raises(DeadlinePassed):
        await ranker.rank(kit.request(1, deadline_s=time.monotonic() + 0.2))
    with pytest.raises(DeadlinePassed):
        await ranker.rank(kit.request(1, deadline_s=time.monotonic() - 1))
    last = asyncio.ensure_future(ranker.rank(kit.request(2)))
    await stand.waiting(2)  # what was sent before it has arrived, too: that nobody waits any more
    stand.sparse.gate.set()
    await asyncio.gather(stuck, last)
    assert sum(stand.sparse.batches) == 2


async def test_a_cancelled_request_costs_no_work(stand: Stand) -> None:
    """It frees its place and the others go on."""
    ranker = await stand.ranker()
    stuck = await stand.stuck(ranker)
    waiting = [asyncio.ensure_future(ranker.rank(kit.request(seed))) for seed in (1, 2, 3)]
    await stand.waiting(3)
    waiting[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]
    last = asyncio.ensure_future(ranker.rank(kit.request(4)))
    await stand.waiting(4)  # what was sent before it has arrived, too
    stand.sparse.gate.set()
    await asyncio.gather(stuck, waiting[0], waiting[2], last)
    assert sum(stand.sparse.batches) == 4


async def test_more_than_fits_is_busy(stand: Stand) -> None:
    """Those over the bound are refused at once, the others are answered."""
    ranker = await stand.ranker()
    stuck = await stand.stuck(ranker)
    many = [asyncio.ensure_future(ranker.rank(kit.request(seed))) for seed in range(20)]
    await until(lambda: sum(task.done() for task in many) == 20 - KNOBS.largest_waiting)
    assert all(isinstance(task.exception(), Busy) for task in many if task.done())
    stand.sparse.gate.set()
    outcomes = await asyncio.gather(stuck, *many, return_exceptions=True)
    assert sum(isinstance(outcome, RankAnswer) for outcome in outcomes) == 1 + KNOBS.largest_waiting


async def test_closing_answers_what_was_accepted(stand: Stand) -> None:
    """New requests are refused meanwhile; closing twice is no fault."""
    ranker = await stand.ranker()
    accepted = [await stand.stuck(ranker)]
    accepted += [asyncio.ensure_future(ranker.rank(kit.request(seed))) for seed in (1, 2)]
    await stand.waiting(2)
    closing = asyncio.ensure_future(ranker.close(drain_s=60))
    while not (asked := await _at_once(ranker.rank(kit.request(4)))).done():
        accepted.append(asked)  # it was before the end
    assert isinstance(asked.exception(), WorkerUnavailable)
    stand.sparse.gate.set()
    await closing
    assert all(answer.outputs["score"].shape == (3,) for answer in await asyncio.gather(*accepted))
    await ranker.close(drain_s=0)
    with pytest.raises(WorkerUnavailable):
        await ranker.rank(kit.request(5))


async def _at_once(answer: Awaitable[RankAnswer]) -> asyncio.Future[RankAnswer]:
    """The request a moment later: whoever is refused is refused by then."""
    asked = asyncio.ensure_future(answer)
    await asyncio.sleep(0.05)
    return asked


async def test_an_error_of_a_half_that_is_the_callers_stays_so(stand: Stand) -> None:
    """`BadInput` with its ``param`` crosses every process border."""

    def refuse(_: object) -> None:
        raise BadInput("item: no such item", param="item")

    stand.sparse.run = refuse  # type: ignore[method-assign, assignment]
    ranker = await stand.ranker()
    with pytest.raises(BadInput, match="no such item") as caught:
        await ranker.rank(kit.request(1))
    assert caught.value.param == "item"
