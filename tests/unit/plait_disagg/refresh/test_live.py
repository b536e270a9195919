"""Refreshed halves against packages opened fresh, the journal, and publishing that breaks off in the middle."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import hashlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plait_disagg.errors import WorkerUnavailable
from plait_disagg.package import Package, PackageError, open_package
from plait_disagg.queue.batch_boundary import BatchBoundary
from plait_disagg.refresh.errors import BadUpdate, NotPublished
from plait_disagg.refresh.fold import fold_updates
from plait_disagg.refresh.journal import Journal
from plait_disagg.refresh.live_package import LivePackage, open_live
from plait_disagg.refresh.make import make_update
from plait_disagg.refresh.prepared_update import touch_pages, write_rows
from plait_disagg.refresh.publish import publish
from plait_disagg.refresh.update import Update
from plait_disagg.tables.storage import open_tables, write_tables
from plait_disagg.values import RankAnswer
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.remote import RemoteCore
from support import refresh as kit
from support.rank_fabric import QUICK, Rig
from support.waiting import until


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Packaged once."""
    return kit.packaged(tmp_path_factory.mktemp("refresh") / "parts")


@pytest.fixture
def package(template: Package, tmp_path: Path) -> Package:
    """A test's own."""
    return open_package(kit.copied(template, tmp_path / "parts"))


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A fabric in this process."""
    with Rig() as made:
        yield made


def live_scores(live: LivePackage, seed: int) -> torch.Tensor:
    """The newest halves, joined directly."""
    assert live.sparse is not None
    asked = kit.request(live.package, seed)
    outputs = live.dense[live.dense_version].run(live.sparse.run([asked]), [asked.candidates])
    return next(iter(outputs.values()))


def answered(answer: RankAnswer) -> torch.Tensor:
    """The scores of an answer."""
    return next(iter(answer.outputs.values()))


async def patiently(served: kit.ServedPackage, seed: int) -> RankAnswer:
    """The answer, as soon as the CN has found its HN again; nothing but `WorkerUnavailable` before."""
    until_s = time.monotonic() + 60.0
    while True:
        try:
            return await served.rank(seed)
        except WorkerUnavailable:
            assert time.monotonic() < until_s, "the HN never came back"
            await asyncio.sleep(0.02)


def applied(live: LivePackage, update: Update) -> None:
    """Staged and taken on, as workers do it."""
    change = live.stage(update)
    change.touch()
    change.write()
    live.adopt(change)


def published(package: Package, scratch: Path, *versions: str) -> None:
    """Updates in the journal, from version 1 on, with no workers to tell."""
    for base, version in zip(("1", *versions), versions, strict=False):
        made = kit.update(package, base, version, seed=int(version))
        publish(package, kit.written(scratch / f"u{version}", made), ())


class TestHalves:
    def test_refreshed_scores_are_those_of_a_package_with_the_updates_inside(self, package, tmp_path):
        """Bit for bit, after each of three updates, whatever format the rows have."""
        live = open_live(package.folder, sparse=True, dense=True)
        for base, version in (("1", "2"), ("2", "3"), ("3", "4")):
            made = kit.update(package, base, version, seed=int(version))
            publish(package, kit.written(tmp_path / f"u{version}", made), ())
            applied(live, made)
            twin = kit.twin(package.folder, tmp_path / f"twin{version}")
            assert twin.manifest.version == live.version == version
            for seed in range(10):
                assert torch.equal(live_scores(live, seed), kit.scores(twin, kit.request(twin, seed)))

    def test_a_worker_that_starts_comes_up_with_the_updates(self, package, tmp_path):
        """The same bits as one that was there all the time; and the last two dense versions."""
        published(package, tmp_path, "2", "3", "4")
        live = open_live(package.folder, sparse=True, dense=True)
        twin = kit.twin(package.folder, tmp_path / "twin")
        assert (live.version, list(live.dense)) == ("4", ["3", "4"])
        assert torch.equal(live_scores(live, 0), kit.scores(twin, kit.request(twin, 0)))

    def test_the_file_and_other_processes_see_nothing(self, package):
        """The mapping is private: the package on disk stays what was packaged."""
        before = hashlib.sha256((package.folder / "tables.safetensors").read_bytes()).digest()
        old = kit.scores(package, kit.request(package, 0))
        live = open_live(package.folder, sparse=True, dense=True)
        applied(live, kit.update(package, "1", "2", seed=2))
        assert not torch.equal(live_scores(live, 0), old)
        assert hashlib.sha256((package.folder / "tables.safetensors").read_bytes()).digest() == before
        assert torch.equal(kit.scores(open_package(package.folder), kit.request(package, 0)), old)

    def test_staging_changes_nothing(self, package):
        """Not even the pages that it touches."""
        live = open_live(package.folder, sparse=True, dense=True)
        before = [live_scores(live, seed) for seed in range(5)]
        live.stage(kit.update(package, "1", "2", seed=2)).touch()
        assert all(torch.equal(live_scores(live, seed), before[seed]) for seed in range(5))

    def test_rows_alone_leave_the_dense_half(self, package):
        """HNs need not know of them."""
        live = open_live(package.folder, sparse=True, dense=True)
        change = live.stage(dataclasses.replace(kit.update(package, "1", "2", seed=2), constants={}))
        assert (change.version, change.dense_version, change.dense, change.sparse) == ("2", "1", None, None)

    def test_weights_go_to_the_half_that_reads_them(self, package):
        """A CN takes its own and no copy of the HN's; both know the new dense version."""
        made = kit.update(package, "1", "2", seed=2)
        cn = open_live(package.folder, sparse=True, dense=False).stage(made)
        hn = open_live(package.folder, sparse=False, dense=True).stage(made)
        assert cn.sparse is not None
        assert hn.dense is not None
        assert (cn.dense, hn.sparse, hn.writes) == (None, None, ())
        assert cn.dense_version == hn.dense_version == "2"


@pytest.mark.parametrize("row_format", ["float32", "float16", "int8"])
@pytest.mark.parametrize("dim", [3, 16, 700])
def test_rows_are_written_where_they_belong(tmp_path, row_format, dim):
    """Against plain assignment; the pages were touched before, which alone changes nothing."""
    chance = torch.Generator().manual_seed(dim)
    write_tables(tmp_path / "t", {"t": torch.randn(97, dim, generator=chance)}, formats=row_format)
    opened, twin = open_tables(tmp_path / "t", copy_on_write=True), open_tables(tmp_path / "t")
    ((name, matrix),) = opened.matrices.items()
    ids = torch.randperm(97, generator=chance)[:40].sort().values
    rows = twin.matrices[name][torch.randperm(97, generator=chance)[:40]]
    touch_pages(matrix, ids)
    assert torch.equal(matrix, twin.matrices[name])
    write_rows(matrix, ids, rows)
    expected = twin.matrices[name].clone()
    expected[ids] = rows
    assert torch.equal(matrix, expected)
    assert (opened.is_writable, twin.is_writable) == (True, False)


class TestMaking:
    def test_an_update_from_a_retrained_module_makes_its_scores(self, package, tmp_path):
        """Packaged anew or refreshed: the same rows and weights."""
        publish(package, kit.written(tmp_path / "u", make_update(package.folder, kit.module(6), version="2")), ())
        live = open_live(package.folder, sparse=True, dense=True)
        module = kit.module(6)
        for seed in range(5):
            asked = kit.request(package, seed)
            tensors = dict(asked.tensors)
            tensors["age"] = tensors["age"].expand(asked.candidates, 3)
            liked = tensors["liked"]
            tensors["liked"] = liked.repeat(asked.candidates)
            tensors["liked_offsets"] = torch.arange(asked.candidates + 1) * len(liked)
            with torch.inference_mode():
                torch.testing.assert_close(live_scores(live, seed), module(**tensors), rtol=0.05, atol=0.05)

    def test_only_what_changed_is_told(self, package, tmp_path):
        """Against the newest version, not the packaged one; rows as they are stored."""
        publish(package, kit.written(tmp_path / "u", make_update(package.folder, kit.module(6), version="2")), ())
        retrained = kit.module(6)
        with torch.no_grad():
            retrained.items.weight[7] += 1
        made = make_update(package.folder, retrained, version="3")
        assert (made.base, made.version, list(made.rows), dict(made.constants)) == ("2", "3", ["items"], {})
        assert made.rows["items"].ids.tolist() == [7]

    def test_the_same_weights_make_no_update(self, package):
        """And say so."""
        with pytest.raises(BadUpdate, match="has the weights"):
            make_update(package.folder, kit.module(), version="2")

    def test_another_model_makes_no_update(self, package):
        """Its rows and weights may even have the same shapes."""

        class Other(kit.Parts):
            def forward(self, age, liked, liked_offsets, item, kind):
                return torch.sigmoid(super().forward(age, liked, liked_offsets, item, kind))

        with pytest.raises(BadUpdate, match="not the model"):
            make_update(package.folder, Other().eval(), version="2")

    def test_what_could_not_be_published_is_not_made(self, package):
        """More rows than the package has, a number that is none, the version that is served: each named."""
        grown = kit.module(6)
        grown.items = torch.nn.Embedding(grown.items.num_embeddings + 3, grown.items.embedding_dim)
        with pytest.raises(BadUpdate, match=r"table items: is \(\d+, \d+\), the package's .*package the model anew"):
            make_update(package.folder, grown, version="2")
        spoilt = kit.module(6)
        with torch.no_grad():
            spoilt.items.weight[7] = torch.nan
        with pytest.raises(BadUpdate, match=r"items.*NaN"):
            make_update(package.folder, spoilt, version="2")
        with torch.no_grad():
            spoilt.liked.weight[7] = torch.nan  # rows of int8, which do not even hold it
        with pytest.raises(BadUpdate, match=r"table liked: .*NaN"):
            make_update(package.folder, spoilt, version="2")
        with pytest.raises(BadUpdate, match="version: 1 is what is served"):
            make_update(package.folder, kit.module(6), version="1")


class TestFolding:
    def test_folding_without_updates_is_a_copy(self, package, tmp_path):
        """Byte for byte, but for the order in which a file names its tensors."""
        fold_updates(package.folder, tmp_path / "out")
        one, other = package.folder / "tables.safetensors", tmp_path / "out" / "tables.safetensors"
        assert one.read_bytes() == other.read_bytes()
        assert open_package(tmp_path / "out").manifest.version == "1"

    def test_a_damaged_package_is_not_copied(self, package, tmp_path):
        """Its hashes would be told anew, and nobody would notice any more."""
        with (package.folder / "tables.safetensors").open("r+b") as file:
            file.seek(-3, 2)
            file.write(b"!")
        with pytest.raises(PackageError, match=r"tables\.safetensors is not what was packaged"):
            fold_updates(package.folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        with pytest.raises(PackageError, match="lies in the package"):
            fold_updates(package.folder, package.folder / "out")

    def test_a_journal_that_can_not_be_read_leaves_nothing(self, package, tmp_path):
        """The folder appears whole or not at all; and a worker does not start with a part of the updates."""
        published(package, tmp_path, "2")
        (package.folder / "updates" / "2" / "rows.safetensors").write_bytes(b"")
        with pytest.raises(PackageError, match="rows"):
            fold_updates(package.folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        with pytest.raises(PackageError, match="rows"):
            open_live(package.folder, sparse=True, dense=True)


class TestPublishing:
    async def test_all_workers_switch_and_answers_say_it(self, package, tmp_path, rig):
        """Two CNs, two HNs; the next answer of each CN is the new version's, bit for bit."""
        served = kit.ServedPackage(rig, package.folder, cns=2, hns=2)
        await served.ready()
        old = await served.rank(0)
        assert old.version == "1"
        version = await served.publish(kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2)))
        twin = kit.twin(package.folder, tmp_path / "twin")
        assert version == twin.manifest.version == "2"
        for cn in (0, 1):
            answer = await served.rank(0, cn=cn)
            assert answer.version == "2"
            assert torch.equal(answered(answer), kit.scores(twin, kit.request(twin, 0)))

    async def test_a_bad_update_changes_nothing_anywhere(self, package, tmp_path, rig):
        """It is not even kept, and the next good one is published."""
        served = kit.ServedPackage(rig, package.folder)
        await served.ready()
        good = kit.update(package, "1", "2", seed=2)
        nan = {**good.constants, "top.bias": torch.tensor([float("nan")])}
        bad = kit.written(tmp_path / "bad", dataclasses.replace(good, constants=nan))
        with pytest.raises(BadUpdate, match=r"top\.bias"):
            await served.publish(bad)
        answer = await served.rank(0)
        assert answer.version == "1"
        assert torch.equal(answered(answer), kit.scores(package, kit.request(package, 0)))
        assert Journal(package.folder).versions() == ()
        assert not Journal(package.folder).path("2").exists()
        assert await served.publish(kit.written(tmp_path / "good", good)) == "2"

    @pytest.mark.parametrize("dead", ["hns", "cns"])
    async def test_a_worker_that_can_not_stage_stops_the_update(self, package, tmp_path, rig, dead):
        """The old version stays everywhere; when the worker is back, publishing again does it."""
        served = kit.ServedPackage(rig, package.folder, cns=2, hns=2)
        await served.ready()
        folder = kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2))
        getattr(served, dead).dead.add(1)
        with pytest.raises(NotPublished, match="nothing has changed"):
            await served.publish(folder)
        assert [(await served.rank(0, cn=cn)).version for cn in (0, 1)] == ["1", "1"]
        assert open_live(package.folder, sparse=True, dense=False).version == "1"
        getattr(served, dead).dead.clear()
        await served.publish(folder)
        assert [(await served.rank(0, cn=cn)).version for cn in (0, 1)] == ["2", "2"]

    async def test_another_update_may_follow_one_that_was_staged_only(self, package, tmp_path, rig):
        """What HNs had prepared for the first is forgotten, and what they serve is not."""
        served = kit.ServedPackage(rig, package.folder)
        await served.ready()
        await served.publish(kit.written(tmp_path / "u2", kit.update(package, "1", "2", seed=2)))
        served.cns.dead.add(0)
        for version in ("3a", "3b"):
            with pytest.raises(NotPublished):
                made = kit.update(package, "2", version, seed=3)
                await served.publish(kit.written(tmp_path / f"u{version}", made))
            assert (await served.rank(0)).version == "2"
        served.cns.dead.clear()
        await served.publish(kit.written(tmp_path / "u3", kit.update(package, "2", "3", seed=4)))
        twin = kit.twin(package.folder, tmp_path / "twin")
        assert torch.equal(answered(await served.rank(1)), kit.scores(twin, kit.request(twin, 1)))

    async def test_a_publisher_that_dies_before_the_switch_can_be_run_again(self, package, tmp_path, rig):
        """The journal decides: one CN has not switched and still answers, by the old version alone; it follows."""
        served = kit.ServedPackage(rig, package.folder, cns=2)
        await served.ready()
        folder = kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2))
        stage = served.cns.stage

        def stage_and_die(update: Path) -> dict[str, Exception | None]:
            outcomes = dict(stage(update))
            served.cns.dead.add(1)
            return outcomes

        served.cns.stage = stage_and_die  # type: ignore[method-assign]
        with pytest.raises(NotPublished, match="is published"):
            await served.publish(folder)
        answers = [await served.rank(0, cn=cn) for cn in (0, 1)]
        assert [answer.version for answer in answers] == ["2", "1"]
        assert torch.equal(answered(answers[1]), kit.scores(package, kit.request(package, 0)))
        served.cns.dead.clear()
        await served.publish(folder)
        again = await served.rank(0, cn=1)
        assert again.version == "2"
        assert torch.equal(answered(again), answered(answers[0]))

    async def test_a_batch_that_runs_meets_no_change(self, package, tmp_path, rig):
        """Its lookups are done and its dense half is not when the update comes: both are of the old version."""
        entered, gate = threading.Event(), threading.Event()

        class Held:
            def __init__(self, inner):
                self.inner = inner

            def run(self, requests):
                crossing = {name: tensor.clone() for name, tensor in self.inner.run(requests).items()}
                entered.set()
                gate.wait(60)
                return crossing

        whole = kit.Whole(rig, package.folder, around=Held)
        asked = asyncio.create_task(whole.rank(0))
        await asyncio.to_thread(entered.wait, 60)
        publishing = asyncio.create_task(
            whole.publish(kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2)))
        )
        await asyncio.sleep(0.3)
        assert not publishing.done()
        gate.set()
        answer = await asked
        assert answer.version == "1"
        assert torch.equal(answered(answer), kit.scores(package, kit.request(package, 0)))
        await publishing
        assert (await whole.rank(0)).version == "2"

    async def test_an_hn_that_restarts_between_the_phases_gets_the_version(self, package, tmp_path, rig):
        """It came up before the update was listed, and the CNs ask it for what it was never told of."""
        served = kit.ServedPackage(rig, package.folder)
        await served.ready()
        stage = served.cns.stage

        def stage_and_restart(update: Path) -> dict[str, Exception | None]:
            outcomes = dict(stage(update))
            served.hn_workers[0].stop(drain_s=0.0)
            served.hns.refreshers = [served.hn("hn0")[1]]
            served.hns.dead.add(0)  # nor is it told to switch
            return outcomes

        served.cns.stage = stage_and_restart  # type: ignore[method-assign]
        with pytest.raises(NotPublished, match="is published"):
            await served.publish(kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2)))
        answer = await patiently(served, 0)
        twin = kit.twin(package.folder, tmp_path / "twin")
        assert answer.version == "2"
        assert torch.equal(answered(answer), kit.scores(twin, kit.request(twin, 0)))

    async def test_workers_follow_the_journal_by_themselves(self, package, tmp_path, rig):
        """A replica that started while an update was published, and whom nobody told."""
        served = kit.ServedPackage(rig, package.folder)
        await served.ready()
        published(package, tmp_path, "2", "3")
        (cn,), (hn,) = served.cns.refreshers, served.hns.refreshers
        assert cn.is_behind()
        cn.catch_up()
        assert not cn.is_behind()
        answer = await served.rank(0)  # its HN does not have that version yet, and gets it
        assert (answer.version, hn.version) == ("3", "3")
        twin = kit.twin(package.folder, tmp_path / "twin")
        assert torch.equal(answered(answer), kit.scores(twin, kit.request(twin, 0)))

    async def test_an_hn_without_the_version_is_no_answer(self, package, tmp_path, rig):
        """The CN asks another one; a version that is nowhere is a clear error, never another version's scores."""
        served = kit.ServedPackage(rig, package.folder, hns=2)
        await served.ready()
        (cn,) = served.cns.refreshers
        folder = kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2))
        served.hns.refreshers[1].stage(folder)
        cn.stage(folder)
        cn.switch("2")
        answers = [await served.rank(seed) for seed in range(6)]
        assert {answer.version for answer in answers} == {"2"}
        served.hns.refreshers[1].stage(kit.written(tmp_path / "v", kit.update(package, "1", "3", seed=3)))
        with pytest.raises(Exception, match="dense versions"):
            await served.rank(0)

    def test_one_publisher_at_a_time(self, package, tmp_path):
        """The second is told to come again."""
        folder = kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2))
        with Journal(package.folder).locked(), pytest.raises(NotPublished, match="another update"):
            publish(package, folder, ())
        assert publish(package, folder, ()) == "2"

    def test_a_version_is_never_used_twice(self, package, tmp_path):
        """The same update again is no error; another one under its name is; so is one that goes on from before."""
        published(package, tmp_path, "2")
        assert publish(package, tmp_path / "u2", ()) == "2"
        other = kit.written(tmp_path / "other", kit.update(package, "1", "2", seed=9))
        with pytest.raises(BadUpdate, match="already"):
            publish(package, other, ())
        stale = kit.written(tmp_path / "stale", kit.update(package, "1", "3", seed=9))
        with pytest.raises(BadUpdate, match="goes on from version 1; the model is at 2"):
            publish(package, stale, ())

    def test_a_crash_while_storing_leaves_the_old_version(self, package, tmp_path):
        """A half copied update, and one that was copied and not listed, are nothing; the next attempt replaces them."""
        journal = Journal(package.folder)
        folder = kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2))
        for leftover in (".2.partial", "2"):
            (package.folder / "updates" / leftover).mkdir(parents=True)
        assert open_live(package.folder, sparse=True, dense=True).version == "1"
        assert publish(package, folder, ()) == "2"
        assert journal.versions() == ("2",)

    def test_an_update_that_lies_where_the_package_keeps_its_own_is_left_alone(self, package):
        """It would be deleted as a leftover before it is copied."""
        folder = kit.written(package.folder / "updates" / "2", kit.update(package, "1", "2", seed=2))
        with pytest.raises(BadUpdate, match="move it elsewhere"):
            publish(package, folder, ())
        assert (folder / "update.json").is_file()

    def test_a_copy_that_fails_leaves_nothing(self, package, tmp_path, monkeypatch):
        """A full disk, or an update whose file is missing (finding 12)."""
        folder = kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2))
        (package.folder / "updates").mkdir()
        real = shutil.copyfile

        def fails(source, target):
            real(source, target)
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(shutil, "copyfile", fails)
        with pytest.raises(OSError, match="No space left"):
            Journal(package.folder).store(folder, "2")
        assert list((package.folder / "updates").glob(".2*")) == []

    @pytest.mark.parametrize(
        "text", ["", "[]", '{"format": 2, "versions": []}', '{"format": 1, "versions": ["../x"]}', '{"format": 1}']
    )
    def test_a_broken_list_stops_a_worker_from_starting(self, package, text):
        """Rather than serve another version than its neighbours."""
        (package.folder / "updates").mkdir()
        (package.folder / "updates" / "applied.json").write_text(text)
        with pytest.raises(PackageError, match=r"applied\.json"):
            open_live(package.folder, sparse=True, dense=True)


async def connected(rig: Rig) -> CoreRanker:
    """A client as the ingress is one."""
    ranker = CoreRanker(RemoteCore("parts", rig.connect("cn"), backoff=QUICK))
    rig.at_end(lambda: ranker.core.stop(drain_s=0.5))
    await until(lambda: ranker.core.ready() is None)
    return ranker


class TestClients:
    async def test_clients_hear_of_the_new_version_at_once(self, package, tmp_path, rig):
        """Without a request, and without a new connection; those that come later are greeted with it."""
        served = kit.ServedPackage(rig, package.folder)
        await served.ready()
        front = rig.front(served.cores[0])
        ranker = await connected(rig)
        served.on_version = lambda _: front.announce()
        assert ranker.card.version == "1"
        await served.publish(kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2)))
        await until(lambda: ranker.card.version == "2")
        later = await connected(rig)
        assert later.card.version == "2"
        answer = await ranker.rank(kit.request(package, 0))
        assert answer.version == "2"

    async def test_hot_rows_follow(self, package, tmp_path, rig):
        """Rows that an HN keeps are sent anew when they have changed; the scores are those without a cache."""
        served = kit.ServedPackage(rig, package.folder, knobs=dataclasses.replace(kit.ALONE, cache_rows=64))
        await served.ready()
        for seed in range(20):
            await served.rank(seed)
        metrics = served.cores[0].metrics()
        assert metrics["cache_hits_total"] > 0
        rows = dataclasses.replace(kit.update(package, "1", "2", seed=2), constants={})
        await served.publish(kit.written(tmp_path / "u", rows))
        twin = kit.twin(package.folder, tmp_path / "twin")
        for seed in range(20):
            assert torch.equal(answered(await served.rank(seed)), kit.scores(twin, kit.request(twin, seed)))
        assert served.cores[0].metrics()["cache_hits_total"] > metrics["cache_hits_total"]


class TestBetween:
    def test_no_change_is_made_inside_a_batch(self):
        """It waits, and is made before the next batch, though batches follow each other without a pause."""
        between, log = BatchBoundary(), []
        with between.batch():
            thread = threading.Thread(target=between.change, args=(lambda: log.append("change"),))
            thread.start()
            while not between._waiting:
                pass
            log.append("batch")
        with between.batch():
            log.append("next")
        thread.join()
        assert log == ["batch", "change", "next"]

    def test_what_a_change_raises_comes_back(self):
        """To the one who wanted it, and to nobody else."""
        between = BatchBoundary()

        def fail() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            between.change(fail)
        with between.batch():
            pass
