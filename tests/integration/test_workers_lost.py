"""Losing a worker: requests are asked once more elsewhere or end with a clear error, and later ones are answered."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from fakes import ranking_model as kit
from plait_disagg.errors import RankError, WorkerUnavailable
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.workers import remote
from plait_disagg.workers.ranker import CoreRanker
from plait_fabric import PeerLost, connect
from support.paused import pause
from support.rank_fabric import PATIENCE_S, Rig, hello_header, right, right_answers
from support.waiting import until


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Workers over shared memory."""
    with Rig("shm") as made:
        yield made


async def test_what_a_lost_hn_had_is_asked_of_another(rig: Rig) -> None:
    """The CN sends the batch again, once; nobody outside notices."""
    slow, quick = kit.FakeDense(), kit.FakeDense()
    slow.gate.clear()
    first = rig.hn(slow, name="hn")
    cn = rig.cn(None, "hn", "other")
    ranker = await rig.local(cn)
    asked = asyncio.ensure_future(ranker.rank(kit.request(1)))
    await until(lambda: first.metrics()["waiting"] == 0 and cn.metrics()["at_hns"] == 1)
    rig.hn(quick, name="other")
    await until(lambda: cn.metrics()["hns"] == 2)
    rig.lose("hn")
    right_answers([await asked], seed=1)
    assert cn.metrics()["lost_batches_total"] == 1
    slow.gate.set()


async def test_without_another_hn_the_request_ends_and_the_next_waits_for_nobody(rig: Rig) -> None:
    """A clear error at once; when an HN comes back, requests are answered again."""
    dense = kit.FakeDense()
    dense.gate.clear()
    rig.hn(dense)
    cn = rig.cn()
    rig.front(cn)
    await until(lambda: cn.ready() is None)
    ranker = await rig.ranker()
    asked = asyncio.ensure_future(ranker.rank(kit.request(1)))
    await until(lambda: cn.metrics()["at_hns"] == 1)
    rig.lose("hn")
    with pytest.raises(WorkerUnavailable, match="HN"):
        await asked
    with pytest.raises(WorkerUnavailable, match="HN") as caught:
        await ranker.rank(kit.request(2))
    assert caught.value.retry_after_s is not None  # the CN knows; it crossed the wire (finding 10)
    assert caught.value.retry_after_s > 2
    assert "HN" in (cn.ready() or "")
    dense.gate.set()
    rig.hn()
    await until(lambda: cn.ready() is None)
    await right(ranker)


async def test_what_a_lost_cn_had_is_asked_of_another(rig: Rig) -> None:
    """As with HNs; requests spread over the CNs before."""
    stuck = kit.FakeSparse()
    stuck.gate.clear()
    rig.front(rig.whole(stuck), name="a")
    rig.front(rig.whole(), name="b")
    ranker = await rig.ranker("a", "b")
    await until(lambda: ranker.metrics()["workers"] == 2)
    asked = [asyncio.ensure_future(ranker.rank(kit.request(seed))) for seed in range(4)]
    await until(lambda: sum(task.done() for task in asked) == 2)  # those of b
    rig.lose("a")
    right_answers(await asyncio.gather(*asked))
    stuck.gate.set()


async def test_workers_that_are_gone_leave_nothing_behind(rig: Rig) -> None:
    """An HN kept the window of each CN that it ever had, and CNs come and go (finding 12)."""
    hn, fixed = rig.hn(name="hn"), WorkerKnobs(window=3, adapt_window=False)
    cn = rig.cn(None, "hn", knobs=fixed)
    rig.front(cn, name="a")
    ranker = await rig.ranker("a")
    for _ in range(4):
        await until(lambda cn=cn: ranker.metrics()["workers"] == 1 and cn.ready() is None)  # type: ignore[misc]
        await right(ranker)
        assert hn.metrics()["window"] == 3
        rig.lose("a")
        cn.stop(drain_s=0)
        await until(lambda: not hn.metrics()["window"] and not ranker.metrics()["workers"])
        cn = rig.cn(None, "hn", knobs=fixed)
        rig.front(cn, name="a")


async def test_a_connection_that_breaks_as_a_request_leaves_costs_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has noticed yet that the worker is gone: the request goes to the other one (finding 10)."""
    rig.front(rig.whole(), name="a")
    rig.front(rig.whole(), name="b")
    ranker = await rig.ranker("a", "b")
    await until(lambda: ranker.metrics()["workers"] == 2)
    broken = rig.dialled["a"]

    def lost(*_: object, **__: object) -> None:
        raise PeerLost("the peer was lost")

    monkeypatch.setattr(broken, "send", lost)
    for seed in itertools.count():  # of two that are idle, one is asked by chance
        await right(ranker, seed)
        if broken.closed:
            break


async def test_what_a_stopping_worker_refuses_is_asked_of_another(rig: Rig) -> None:
    """A CN, or an HN, that takes no more while it drains costs nobody an answer."""
    stopping = rig.whole()
    rig.front(stopping, name="a")
    hns = [rig.hn(name=name) for name in ("x", "y")]
    cn = rig.cn(None, "x", "y")
    rig.front(cn, name="b")
    ranker = await rig.ranker("a", "b")
    await until(lambda: ranker.metrics()["workers"] == 2 and cn.metrics()["hns"] == 2)
    stopping.stop(drain_s=1)
    hns[0]._loop.close()
    for seed in range(6):
        await right(ranker, seed)
    assert stopping.metrics()["requests_total"] == 0


async def test_a_card_is_known_once_a_worker_said_it(rig: Rig) -> None:
    """Until then it is unavailable; it stays known when the worker is lost."""
    ranker = CoreRanker(remote.RemoteCore("tiny", rig.connect("cn")))
    with pytest.raises(WorkerUnavailable):
        _ = ranker.card
    with pytest.raises(WorkerUnavailable):
        await ranker.rank(kit.request(1))
    assert ranker.metrics()["sent_total"] == 0
    front = rig.front(rig.whole())
    await until(lambda: ranker.core.ready() is None)
    front.stop(drain_s=0)
    await until(lambda: ranker.core.ready() is not None)
    assert ranker.card == kit.CARD
    await ranker.close(drain_s=0)


async def test_halves_of_different_versions_do_not_meet(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The CN refuses an HN with another model or version, and says so in the log."""
    rig.hn(card=dataclasses.replace(kit.CARD, version="2"))
    cn = rig.cn()
    await until(lambda: "tiny 2" in caplog.text)
    assert cn.ready() == "no HN answers"
    assert cn.metrics()["hns"] == 0


async def test_the_window_bounds_what_is_at_an_hn(rig: Rig) -> None:
    """While it is full, requests gather into one larger batch."""
    dense, sparse = kit.FakeDense(), kit.FakeSparse()
    dense.gate.clear()
    rig.hn(dense)
    # Of one thread, a CN on a slow host would split what waits into two batches, so that both sides compute at once.
    cn = rig.cn(sparse, knobs=WorkerKnobs(window=2, threads=2))
    ranker = await rig.local(cn)
    asked = []
    for seed in range(2):
        asked.append(asyncio.ensure_future(ranker.rank(kit.request(seed))))
        await until(lambda: cn.metrics()["at_hns"] == len(asked))
    asked += [asyncio.ensure_future(ranker.rank(kit.request(seed))) for seed in range(2, 10)]
    await until(lambda: cn.metrics()["waiting"] == 8)
    await asyncio.sleep(0.1)
    assert cn.metrics()["at_hns"] == 2
    dense.gate.set()
    right_answers(await asyncio.gather(*asked))
    assert sparse.batches == [1, 1, 8]


async def test_a_worker_that_hangs_counts_as_lost(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """No answer within the time-out: the request ends, and the line dials again."""
    sparse = kit.FakeSparse()
    sparse.gate.clear()
    rig.front(rig.whole(sparse))
    ranker = await rig.ranker(answer_timeout_s=1.0)
    with pytest.raises(WorkerUnavailable, match="model tiny"):
        await ranker.rank(kit.request(1))
    assert "no answer within 1 s" in caplog.text
    sparse.gate.set()
    await until(lambda: ranker.core.ready() is None)
    await right(ranker)


WORKER = """
import sys, threading
from fakes import ranking_model as kit
from plait_disagg.workers.core_server import CoreServer
from plait_disagg.workers.whole import WholeCore
from plait_fabric import listen
listener = listen(sys.argv[1], secret=bytes.fromhex(sys.argv[2]))
worker = CoreServer(WholeCore(kit.CARD, kit.FakeSparse(), kit.FakeDense()), [listener])
print(listener.address, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_a_worker_that_stops_reading_does_not_stop_the_event_loop(
    scheme: Literal["shm", "tcp"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ingress goes on with everything else while a worker's process is stopped (finding 9): if it waited for room
    there, it would wait for the time-out, and nobody would be asked any more."""
    monkeypatch.setattr(remote, "SEND_S", PATIENCE_S)
    with Rig(scheme) as rig:
        address = f"shm://{rig.folder}/cn" if scheme == "shm" else "tcp://127.0.0.1:0"
        command = [sys.executable, "-c", WORKER, address, rig.secret.hex()]
        worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert worker.stdout is not None
        try:
            rig.addresses["cn"] = (await worker.stdout.readline()).decode().strip()
            ranker = await rig.ranker()
            await right(ranker)
            pause(worker.pid)
            request = kit.request(1, 5_000)
            asked = []
            for _ in range(200):
                asked.append(asyncio.ensure_future(ranker.rank(request)))
                await asyncio.sleep(0)
            assert not any(task.done() for task in asked)
        finally:
            worker.kill()
            await worker.wait()
        ends = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE_S)
        assert {type(end) for end in ends} == {WorkerUnavailable}


async def test_garbage_from_a_client_costs_only_its_own_channel(rig: Rig) -> None:
    """Whoever breaks the protocol is hung up on; the others do not notice."""
    rig.front(rig.whole())
    ranker = await rig.ranker()
    hello = hello_header("rank")
    for first, then in (
        ({"kind": "rank"}, None),
        ({**hello, "version": 99}, None),
        ({**hello, "role": "dense"}, None),
        (hello, {"kind": "what", "number": 1}),
        (hello, {"kind": "rank", "number": -1}),
        (hello, {"kind": "rank", "number": "1"}),
    ):
        with connect(rig.addresses["cn"], secret=rig.secret) as channel:
            channel.send(first)
            if then is not None:
                channel.recv(PATIENCE_S).release()
                channel.send(then)
            with pytest.raises(Exception, match="peer"):
                channel.recv(PATIENCE_S)
    await right(ranker)


async def test_a_request_of_another_version_is_bad_input(rig: Rig) -> None:
    """Tensors that do not fill the layout are refused; the channel lives on."""
    rig.front(rig.whole())
    ranker = await rig.ranker()
    request = kit.request(1)
    for tensors in (
        {**request.tensors, "price": torch.zeros(2, 1)},
        {**request.tensors, "price": torch.zeros(3, 2)},
        {"age": request.tensors["age"]},
    ):
        with pytest.raises(RankError, match="does not fit"):
            await ranker.rank(dataclasses.replace(request, tensors=tensors))
    await right(ranker)
    assert ranker.metrics()["lost_total"] == 0
