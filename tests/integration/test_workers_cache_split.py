"""The hot-row cache between running workers: scores stay what they are, bytes fall, and a lost HN costs no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from fakes.ranking_model import FakeDense
from plait_disagg.errors import BadInput
from plait_disagg.messages.hot_rows import RowSavings, RowSender
from plait_disagg.messages.layout import layout_of_crossing
from plait_disagg.messages.wire import dense_message
from plait_disagg.package.halves import CompiledDense
from plait_disagg.package.read import Package
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.values import RankAnswer
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.ranker import CoreRanker
from plait_fabric import connect
from support import rank_rows as kit
from support.rank_fabric import Rig, hello_header
from support.refresh import scores
from support.waiting import until


class GatedDense(FakeDense):
    """A package's dense half, behind the gate."""

    def __init__(self, inner: CompiledDense) -> None:
        super().__init__()
        self.inner, self.crossing = inner, inner.crossing

    def run(self, crossing: Mapping[str, torch.Tensor], candidates: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """See `DenseHalf`."""
        self.gate.wait(60)
        self.batches.append(tuple(candidates))
        return self.inner.run(crossing, candidates)


@pytest.fixture(scope="module")
def match(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The model `Match`; no test changes it."""
    return kit.packaged(tmp_path_factory.mktemp("rows") / "match")


class Workers:
    """CNs and HNs of one package over a rig."""

    def __init__(self, rig: Rig, package: Package) -> None:
        self.rig, self.package = rig, package

    def hn(self) -> tuple[HnWorker, GatedDense]:
        """An HN that listens."""
        dense = GatedDense(self.package.dense())
        return self.rig.hn(dense, card=self.package.card()), dense

    async def cn(self, **knobs: object) -> CnCore:
        """A CN with that HN."""
        of_cn = WorkerKnobs(**knobs)  # type: ignore[arg-type]
        core = self.rig.cn(self.package.sparse(), card=self.package.card(), knobs=of_cn)
        await until(lambda: core.ready() is None)
        return core

    async def right(self, cn: CnCore, seed: int, candidates: int = 7) -> None:
        """Asks and compares: bits, if the request was alone in its batch."""
        _same(self.package, seed, candidates, await self.asked(cn, seed, candidates), exact=True)

    def asked(self, cn: CnCore, seed: int, candidates: int = 7) -> asyncio.Future[RankAnswer]:
        """A request on its way."""
        return asyncio.ensure_future(CoreRanker(cn).rank(kit.request(self.package, seed, candidates)))


def _same(package: Package, seed: int, candidates: int, answer: RankAnswer, *, exact: bool = False) -> None:
    expected = scores(package, kit.request(package, seed, candidates))
    found = next(iter(answer.outputs.values()))
    torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5}))


@pytest.fixture
def workers(match: Package) -> Iterator[Workers]:
    """Over shared memory."""
    with Rig("shm") as rig:
        yield Workers(rig, match)


async def test_scores_are_the_same_and_fewer_bytes_cross(workers: Workers) -> None:
    """Bit for bit the whole model's; what crosses less is what the CN counts as saved."""
    workers.hn()
    plain = await workers.cn()
    cached = await workers.cn(cache_rows=500)
    for seed in range(12):
        await workers.right(plain, seed)
        await workers.right(cached, seed)
    before, after = plain.metrics(), cached.metrics()
    assert not any(before[name] for name in before if name.startswith("cache_"))
    assert after["crossed_bytes_total"] + after["cache_saved_bytes"] == before["crossed_bytes_total"]
    assert after["cache_saved_bytes"] > 0
    assert after["cache_ids_total"] == 12 * (6 + 7 + 7)


async def test_many_batches_in_flight_from_two_cns_merge_at_one_hn(workers: Workers) -> None:
    """Each CN has caches of its own at the HN; a slot that is taken again does not change a batch that waits."""
    hn, dense = workers.hn()
    hn.reconfigure(WorkerKnobs(threads=2))  # of one thread, whoever receives a batch would compute it and see no other
    cns = [await workers.cn(window=16, adapt_window=False, cache_rows=rows) for rows in (3, 1000)]
    dense.gate.clear()
    asked = []
    for seed in range(24):
        asked.append(workers.asked(cns[seed % 2], seed, 1 + seed % 9))
        await until(lambda: sum(cn.metrics()["at_hns"] for cn in cns) == len(asked))
        await until(lambda: hn.metrics()["batches_total"] == 1)  # so that the first one is alone
    await until(lambda: hn.metrics()["waiting"] == 23)
    dense.gate.set()
    for seed, answer in enumerate(await asyncio.gather(*asked)):
        _same(workers.package, seed, 1 + seed % 9, answer)
    assert [len(batch) for batch in dense.batches] == [1, 23]
    assert cns[0].metrics()["cache_evicted_total"] > 0


async def test_one_hn_that_comes_back_knows_nothing(workers: Workers) -> None:
    """The directory is forgotten with the channel, so the first requests miss again."""
    workers.hn()
    cn = await workers.cn(cache_rows=1000)
    for _ in range(2):
        await workers.right(cn, 1)
    sent, stale = cn.metrics()["cache_rows_sent_total"], dict(cn._hns)
    workers.rig.lose("hn")
    await until(lambda: cn.ready() is not None)
    cn._hns.update(stale)  # as a batch does that was being packed while the channel died
    workers.hn()
    await until(lambda: cn.ready() is None)
    for _ in range(2):
        await workers.right(cn, 1)
    assert cn.metrics()["cache_rows_sent_total"] == 2 * sent


async def test_a_change_of_knobs_on_a_running_cn(workers: Workers) -> None:
    """Larger, smaller, another policy, off and on again, and floats that travel otherwise: each begins anew."""
    workers.hn()
    cn = await workers.cn()
    for knobs in (
        WorkerKnobs(cache_rows=50),
        WorkerKnobs(cache_rows=3),
        WorkerKnobs(),
        WorkerKnobs(cache_rows=3),
        WorkerKnobs(cache_rows=3, cache="static"),
        WorkerKnobs(cache_rows=50, wire="int8"),
        WorkerKnobs(cache_rows=50),
    ):
        cn.reconfigure(knobs)
        for seed in range(3):
            answer = await workers.asked(cn, seed)
            if knobs.wire == "float32":
                _same(workers.package, seed, 7, answer, exact=True)


async def test_a_batch_that_fails_before_it_leaves_does_no_harm(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id that is refused, a table that fails, a message that does not fit: later requests are right."""
    workers.hn()
    cn = await workers.cn(cache_rows=10)
    await workers.right(cn, 0)
    request = kit.request(workers.package, 1)
    bad = {**request.tensors, "item": request.tensors["item"] + kit.ITEMS}
    with pytest.raises(BadInput, match="items"):
        await CoreRanker(cn).rank(type(request)(request_id="r", model="match", candidates=7, tensors=bad))
    await workers.right(cn, 1)
    channel = workers.rig.dialled["hn"]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("lost on the way")

    with monkeypatch.context() as patch:
        patch.setattr(channel, "send", fail)
        with pytest.raises(Exception, match="internal error"):
            await workers.asked(cn, 2)
    assert workers.rig.dialled["hn"] is channel
    assert not channel.closed
    for seed in range(2, 6):
        await workers.right(cn, seed)


async def test_a_malformed_cached_batch_costs_only_its_own_channel(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    """The HN hangs up on who sent it and serves the others."""
    workers.hn()
    cn = await workers.cn(cache_rows=10)
    await workers.right(cn, 0)
    package, sparse = workers.package, workers.package.sparse()
    sender = RowSender(sparse, WorkerKnobs(cache_rows=8), RowSavings())
    tensors, hot = sender.encode(sparse.run_ids([kit.request(package)]))
    layout = layout_of_crossing(package.dense().crossing, package.card().inputs)
    nowhere = torch.full((7,), -1, dtype=torch.int32)
    for items, changes, why in (
        (tensors["items"], {"hot": "what"}, "hot is not number, slots, ports"),
        (nowhere, {}, "a slot is outside"),
    ):
        with connect(workers.rig.addresses["hn"], secret=workers.rig.secret) as channel:
            channel.send(hello_header("dense"))
            channel.recv(60).release()
            crossing = tensors | {"items": items}
            header, buffers = dense_message(0, layout, crossing, [7], channel.pool, wire="float32", hot=hot)
            channel.send({**header, **changes}, buffers)
            with pytest.raises(Exception, match="peer"):
                channel.recv(60)
        assert why in caplog.text
    for seed in range(1, 4):
        await workers.right(cn, seed)
