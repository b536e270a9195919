"""Workers that come and go, answer twice, or answer nothing: CNs follow, nobody is confused."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from fakes import ranking_model as kit
from plait_disagg.errors import DeadlinePassed, RankError, WorkerUnavailable
from plait_disagg.messages.wire import answers_message, failures_header, parse_dense
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.values import RankAnswer, RankTimings
from plait_disagg.workers.whole import WholeCore
from plait_fabric import Channel, FabricError
from support.log_file import LogFile, log_file
from support.rank_fabric import CROSSING, OUTPUTS, Rig, right, right_answers, welcome_header
from support.waiting import until

__all__ = ["log_file"]


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Workers in this process."""
    with Rig() as made:
        yield made


def _bad_hn(rig: Rig, answer: Callable[[Channel, int, dict[str, torch.Tensor]], None]) -> None:
    """An HN at "hn" whose answers are sent by ``answer`` from a batch's number and outputs."""
    listener = rig.listen("hn")

    def serve(channel: Channel) -> None:
        channel.recv(60).release()
        channel.send(welcome_header(kit.CARD))
        while True:
            with channel.recv() as message:
                ask = parse_dense(message.header, message.buffers, CROSSING)
                answer(channel, ask.number, dict(kit.FakeDense().run(ask.crossing, ask.candidates)))

    def accept() -> None:
        while True:
            try:
                channel = listener.accept()
            except FabricError:
                return
            with suppress(FabricError), channel:
                serve(channel)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    rig.callback(thread.join, 60)
    rig.callback(listener.close)


def _send(channel: Channel, number: int, outputs: dict[str, torch.Tensor]) -> None:
    answer = RankAnswer(outputs=outputs, timings=RankTimings(dense_ms=1.0))
    header, buffers = answers_message([(number, answer)], OUTPUTS, channel.pool)
    channel.send(header, buffers)


async def test_an_hn_that_answers_twice_confuses_nobody(rig: Rig) -> None:
    """The first answer counts, the second one is counted; the channel stays, and later requests get their own."""

    def twice(channel: Channel, number: int, outputs: dict[str, torch.Tensor]) -> None:
        _send(channel, number, outputs)
        _send(channel, number, {name: value + 1.0 for name, value in outputs.items()})

    _bad_hn(rig, twice)
    cn = rig.cn()
    ranker = await rig.local(cn)
    for seed in range(5):
        await right(ranker, seed)
    await until(lambda: cn.metrics()["late_answers_total"] == 5)
    assert cn.metrics()["lost_batches_total"] == 0


async def test_an_answer_to_nothing_costs_the_channel(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A number that was never asked: whoever sends it is hung up on, and the request ends with a clear error."""
    _bad_hn(rig, lambda channel, number, outputs: _send(channel, number + 1_000, outputs))
    ranker = await rig.local(rig.cn())
    with pytest.raises(WorkerUnavailable, match="no HN answers"):
        await ranker.rank(kit.request(1))
    assert "never asked" in caplog.text


async def test_an_answer_of_other_rows_costs_the_channel_and_leaves_nobody_waiting(rig: Rig) -> None:
    """Its batch is asked for once more, and then refused: a request without a deadline must not hang."""
    _bad_hn(
        rig, lambda channel, number, outputs: _send(channel, number, {name: it[1:] for name, it in outputs.items()})
    )
    ranker = await rig.local(rig.cn())
    with pytest.raises(WorkerUnavailable, match="no HN answers"):
        async with asyncio.timeout(60):
            await ranker.rank(kit.request(1))


async def test_an_answer_after_the_deadline_reaches_nobody(rig: Rig) -> None:
    """The caller was told in time; the answer that comes later is taken, and the next request gets its own."""
    dense = kit.FakeDense()
    dense.gate.clear()
    rig.hn(dense)
    cn = rig.cn()
    rig.front(cn)
    await until(lambda: cn.ready() is None)
    ranker = await rig.ranker()
    with pytest.raises(DeadlinePassed):
        await ranker.rank(dataclasses.replace(kit.request(1), deadline_s=time.monotonic() + 0.2))
    dense.gate.set()
    await right(ranker, 2)
    await until(lambda: cn.metrics()["at_hns"] == 0)


async def test_hns_that_are_idle_share_what_waits(rig: Rig) -> None:
    """Requests that wait together go to both HNs, half each, and not all to one while the other looks on."""
    halves, sparse, now_s = (kit.FakeDense(), kit.FakeDense()), kit.FakeSparse(poison=frozenset({7})), time.monotonic()
    for name, dense in zip(("first", "second"), halves, strict=True):
        dense.gate.clear()
        rig.hn(dense, name=name)
    cn = rig.cn(sparse, "first", "second", clock=lambda: now_s)
    await until(lambda: cn.metrics()["hns"] == 2)
    cn._loop.pace.saw_batch(3, 0.001)
    cn._loop.pace.saw_answer(0.1)  # there is time to share
    ranker = await rig.local(cn)
    sparse.gate.clear()
    bad = asyncio.ensure_future(ranker.rank(kit.request(changes={"item": torch.tensor([7, 7, 7])})))
    await until(lambda: sparse.entered > 0)
    asked = [asyncio.ensure_future(ranker.rank(kit.request(seed))) for seed in range(8)]
    await until(lambda: cn.metrics()["waiting"] == 8)
    sparse.gate.set()
    await until(lambda: cn.metrics()["at_hns"] == 2)
    for dense in halves:
        dense.gate.set()
    right_answers(await asyncio.gather(*asked))
    with pytest.raises(RankError):
        await bad
    assert [dense.batches for dense in halves] == [[(3, 3, 3, 3)]] * 2


async def test_what_an_hn_gives_up_as_too_late_makes_the_cn_more_careful(rig: Rig) -> None:
    """The lookups were for nothing, so the CN refuses earlier from now on; answers that come in time undo it."""
    is_full = threading.Event()
    is_full.set()

    def late(channel: Channel, number: int, outputs: dict[str, torch.Tensor]) -> None:
        if is_full.is_set():
            channel.send(failures_header([(number, DeadlinePassed("too late"))]))
        else:
            _send(channel, number, outputs)

    _bad_hn(rig, late)
    cn = rig.cn()
    ranker, pace = await rig.local(cn), cn._loop.pace
    margins = [pace.margin]

    async def ask() -> None:
        await ranker.rank(dataclasses.replace(kit.request(1), deadline_s=time.monotonic() + 30.0))

    for _ in range(2):
        with pytest.raises(DeadlinePassed):
            await ask()
        margins.append(pace.margin)
    is_full.clear()
    await ask()
    assert margins[0] < margins[1] < margins[2] > pace.margin


async def test_very_many_answers_at_once_arrive(rig: Rig) -> None:
    """More than the header of one message holds; a version may be a date and a time."""
    sparse = kit.FakeSparse()
    card = dataclasses.replace(kit.CARD, version="2026-11-28T22-30-00-retrained-nightly")
    core = WholeCore(card, sparse, kit.FakeDense(), knobs=WorkerKnobs(largest_batch_rows=5_000))
    rig.callback(core.stop, drain_s=0.5)
    rig.front(core)
    ranker = await rig.ranker()
    sparse.gate.clear()
    asked = [asyncio.ensure_future(ranker.rank(kit.request(0, 1)))]
    await until(lambda: sparse.entered == 1)  # alone, so that all others share a batch
    asked += [asyncio.ensure_future(ranker.rank(kit.request(seed, 1))) for seed in range(1, 1_001)]
    await until(lambda: core.metrics()["requests_total"] + core.metrics()["waiting"] == len(asked))
    sparse.gate.set()
    answers = await asyncio.gather(*asked)
    assert max(sparse.batches) > 900
    assert {answer.version for answer in answers} == {card.version}
    assert ranker.metrics()["lost_total"] == 0


async def test_after_its_deadline_a_lost_request_is_not_asked_again(rig: Rig) -> None:
    """The other HN has no work with what nobody waits for."""
    stuck, other = kit.FakeDense(), kit.FakeDense()
    stuck.gate.clear()
    rig.hn(stuck, name="first")
    cn = rig.cn(None, "first", "second")
    ranker = await rig.local(cn)
    with pytest.raises(DeadlinePassed):
        await ranker.rank(dataclasses.replace(kit.request(1), deadline_s=time.monotonic() + 1.0))
    rig.hn(other, name="second")
    await until(lambda: cn.metrics()["hns"] == 2)
    rig.lose("first")
    await until(lambda: cn.metrics()["lost_batches_total"] == 1 and cn.metrics()["waiting"] == 0)
    stuck.gate.set()
    await right(ranker, 2)
    assert len(other.batches) == 1


async def test_lines_follow_the_number_of_hns(rig: Rig) -> None:
    """New ones are found, up to the most, and gone ones let go, without a word to the CN."""
    names = [f"hn{i}" for i in range(4)]
    cn = rig.cn(None, *names, hns=1, max_hns=3)
    hns = [rig.hn(name=names[0])]
    await until(lambda: cn.metrics()["hns"] == 1)
    hns += [rig.hn(name=name) for name in names[1:]]
    await until(lambda: cn.metrics()["hns"] == 3)
    for hn in hns[1:]:
        hn.stop(drain_s=0.5)
    await until(lambda: cn.metrics()["hns"] == 1)
    ranker = await rig.local(cn)
    await right(ranker)
    rig.hn(name=names[2])
    await until(lambda: cn.metrics()["hns"] == 2)
    await right(ranker)


async def test_urgent_batches_pass_others_at_the_hn(rig: Rig) -> None:
    """Deadlines travel with batches: of two CNs' that wait, the more urgent is computed first."""
    dense = kit.FakeDense()
    dense.gate.clear()
    hn = rig.hn(dense)
    hn.reconfigure(WorkerKnobs(largest_batch_rows=1, threads=2))  # of one thread, whoever receives a batch computes it
    cns = [rig.cn() for _ in range(2)]
    rankers = [await rig.local(cn) for cn in cns]
    asked = []
    for number, (ranker, left_s) in enumerate([(0, 60.0), (0, 50.0), (1, 30.0), (1, None), (0, 40.0)]):
        deadline_s = None if left_s is None else time.monotonic() + left_s
        request = dataclasses.replace(kit.request(number, 10 + number), deadline_s=deadline_s)
        asked.append(asyncio.ensure_future(rankers[ranker].rank(request)))
        await until(lambda: sum(cn.metrics()["at_hns"] for cn in cns) == len(asked))
        await until(lambda: hn.metrics()["batches_total"] == 1)
    await until(lambda: hn.metrics()["waiting"] == 4)
    dense.gate.set()
    await asyncio.gather(*asked)
    assert [sizes for (sizes,) in dense.batches] == [10, 13, 12, 14, 11]


async def test_lines_of_cn_and_hn_name_the_request(rig: Rig, log_file: LogFile) -> None:
    """Whichever half fails, its process says whose batch it was."""
    rig.hn(kit.FakeDense(poison=0.5))
    cn = rig.cn(kit.FakeSparse(poison=frozenset({7})))
    await until(lambda: cn.ready() is None)
    rig.front(cn)
    ranker = await rig.ranker()
    bad = {"item": torch.tensor([7, 7, 7])}, {"price": torch.full((3, 1), 0.5)}
    for seed, changes in enumerate(bad):
        with pytest.raises(RankError):
            await ranker.rank(kit.request(seed, changes=changes))
    of_cn, of_hn = log_file.lines("a batch failed unexpectedly")
    assert of_cn.endswith(" [r0]")
    assert of_hn.endswith(" [r1]")
