"""Refreshed halves against packages opened fresh, the journal, and publishing that breaks off in the middle."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import shutil
import threading
from pathlib import Path

import pytest
import torch

from plait_disagg.graph.sample_inputs import collate, for_module
from plait_disagg.package.manifest import PackageError
from plait_disagg.package.read import Package, open_package
from plait_disagg.refresh.errors import BadUpdate, NotPublished
from plait_disagg.refresh.fold import fold_updates
from plait_disagg.refresh.journal import Journal
from plait_disagg.refresh.live_package import LivePackage, open_live
from plait_disagg.refresh.make import make_update
from plait_disagg.refresh.prepared_update import RowWrite
from plait_disagg.refresh.publish import publish
from plait_disagg.tables.storage import open_tables, write_tables
from plait_disagg.values import RankAnswer
from plait_disagg.workers.base import BatchBoundary
from support import refresh as kit
from support.waiting import until, wait_for


@pytest.fixture
def package(parts: Package, tmp_path: Path) -> Package:
    """A test's own."""
    return open_package(kit.copied(parts, tmp_path / "parts"))


def live_scores(live: LivePackage, seed: int) -> torch.Tensor:
    """The newest halves, joined directly."""
    assert live.sparse is not None
    asked = kit.request(live.package, seed)
    outputs = live.dense[live.dense_version].run(live.sparse.run([asked]), [asked.candidates])
    return next(iter(outputs.values()))


@pytest.fixture
def update(package: Package, tmp_path: Path) -> Path:
    """A folder that brings the package to version 2."""
    return kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2))


def assert_of(package: Package, answer: RankAnswer, seed: int = 0) -> None:
    """The answer has the package's version and bits."""
    assert answer.version == package.manifest.version
    assert torch.equal(next(iter(answer.outputs.values())), kit.scores(package, kit.request(package, seed)))


def published(package: Package, scratch: Path, *versions: str) -> None:
    """Updates in the journal, from version 1 on, with no workers to tell."""
    for base, version in zip(("1", *versions), versions, strict=False):
        made = kit.update(package, base, version, seed=int(version))
        publish(package, kit.written(scratch / f"u{version}", made), ())


class TestHalves:
    def test_a_half_takes_what_it_reads(self, package):
        """A CN its own weights and no copy of the HN's; both know the new dense version. Rows are a CN's alone."""
        made = kit.update(package, "1", "2", seed=2)
        cn = open_live(package.folder, sparse=True, dense=False).stage(made)
        hn = open_live(package.folder, sparse=False, dense=True).stage(made)
        assert cn.sparse is not None
        assert hn.dense is not None
        assert (cn.dense, hn.sparse, hn.writes) == (None, None, ())
        assert cn.dense_version == hn.dense_version == "2"
        rows = open_live(package.folder, sparse=True, dense=True).stage(kit.only(made, "rows"))
        assert (rows.version, rows.dense_version, rows.dense, rows.sparse) == ("2", "1", None, None)

    def test_a_worker_that_starts_comes_up_with_the_updates(self, package, tmp_path):
        """The same bits as one that was there all the time; and the last two dense versions."""
        published(package, tmp_path, "2", "3", "4")
        live = open_live(package.folder, sparse=True, dense=True)
        twin = kit.twin(package.folder, tmp_path / "twin")
        assert (live.version, list(live.dense)) == ("4", ["3", "4"])
        assert torch.equal(live_scores(live, 0), kit.scores(twin, kit.request(twin, 0)))


@pytest.mark.parametrize("row_format", ["float32", "float16", "int8"])
@pytest.mark.parametrize("dim", [3, 16, 700])
def test_rows_are_written_where_they_belong(tmp_path, row_format, dim):
    """Against plain assignment; the pages were touched before, which alone changes nothing. The mapping is private:
    the file and other processes see nothing."""
    chance = torch.Generator().manual_seed(dim)
    write_tables(tmp_path / "t", {"t": torch.randn(97, dim, generator=chance)}, formats=row_format)
    opened, twin = open_tables(tmp_path / "t", copy_on_write=True), open_tables(tmp_path / "t")
    ((name, matrix),) = opened.matrices.items()
    ids = torch.randperm(97, generator=chance)[:40].sort().values
    before = twin.matrices[name].clone()
    rows = before[torch.randperm(97, generator=chance)[:40]]
    write = RowWrite(matrix=matrix, ids=ids, rows=rows)
    write.touch()
    assert torch.equal(matrix, before)
    write.write()
    assert torch.equal(twin.matrices[name], before)
    before[ids] = rows
    assert torch.equal(matrix, before)
    assert (opened.is_writable, twin.is_writable) == (True, False)


class TestMaking:
    def test_an_update_from_a_retrained_module_makes_its_scores(self, package, tmp_path):
        """Packaged anew or refreshed: the same rows and weights."""
        module = kit.module(6)
        publish(package, kit.written(tmp_path / "u", make_update(package.folder, module, version="2")), ())
        live = open_live(package.folder, sparse=True, dense=True)
        for seed in range(5):
            asked = kit.request(package, seed)
            tensors = for_module(kit.INPUTS, collate(kit.INPUTS, [asked.tensors], [asked.candidates]))
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

    def test_another_model_makes_no_update(self, package):
        """Its rows and weights may even have the same shapes."""

        class Other(kit.Parts):
            def forward(self, age, liked, liked_offsets, item, kind):
                return torch.sigmoid(super().forward(age, liked, liked_offsets, item, kind))

        with pytest.raises(BadUpdate, match="not the model"):
            make_update(package.folder, Other().eval(), version="2")

    def test_what_could_not_be_published_is_not_made(self, package):
        """The weights of now, more rows than the package has, a number that is none, the version that is served: each
        named."""
        with pytest.raises(BadUpdate, match="has the weights"):
            make_update(package.folder, kit.module(), version="2")
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
    def test_a_bad_update_is_not_even_kept(self, package, tmp_path):
        """And the next good one is published."""
        good = kit.update(package, "1", "2", seed=2)
        nan = {**good.constants, "top.bias": torch.tensor([float("nan")])}
        with pytest.raises(BadUpdate, match=r"top\.bias"):
            publish(package, kit.written(tmp_path / "bad", dataclasses.replace(good, constants=nan)), ())
        assert Journal(package.folder).versions() == ()
        assert not Journal(package.folder).path("2").exists()
        assert publish(package, kit.written(tmp_path / "good", good), ()) == "2"

    @pytest.mark.parametrize("dead", ["hns", "cns"])
    async def test_a_worker_that_can_not_stage_stops_the_update(self, package, update, tmp_path, rig, dead):
        """The old version stays everywhere; when the worker is back, publishing again does it."""
        served = await kit.ServedPackage(rig, package.folder, cns=2, hns=2).ready()
        getattr(served, dead).dead.add(1)
        with pytest.raises(NotPublished, match="nothing has changed"):
            await served.publish(update)
        for cn in (0, 1):
            assert_of(package, await served.rank(0, cn=cn))
        assert open_live(package.folder, sparse=True, dense=False).version == "1"
        getattr(served, dead).dead.clear()
        await served.publish(update)
        twin = kit.twin(package.folder, tmp_path / "twin")
        for cn in (0, 1):
            assert_of(twin, await served.rank(0, cn=cn))

    async def test_another_update_may_follow_one_that_was_staged_only(self, package, update, tmp_path, rig):
        """What HNs had prepared for the first is forgotten, and what they serve is not."""
        served = await kit.ServedPackage(rig, package.folder).ready()
        await served.publish(update)
        served.cns.dead.add(0)
        for version in ("3a", "3b"):
            with pytest.raises(NotPublished):
                made = kit.update(package, "2", version, seed=3)
                await served.publish(kit.written(tmp_path / f"u{version}", made))
            assert (await served.rank(0)).version == "2"
        served.cns.dead.clear()
        await served.publish(kit.written(tmp_path / "u3", kit.update(package, "2", "3", seed=4)))
        assert_of(kit.twin(package.folder, tmp_path / "twin"), await served.rank(1), 1)

    async def test_a_publisher_that_dies_before_the_switch_can_be_run_again(self, package, update, tmp_path, rig):
        """The journal decides: one CN has not switched and still answers, by the old version alone; it follows."""
        served = await kit.ServedPackage(rig, package.folder, cns=2).ready()
        served.cns.after_stage = lambda: served.cns.dead.add(1)
        with pytest.raises(NotPublished, match="is published"):
            await served.publish(update)
        twin = kit.twin(package.folder, tmp_path / "twin")
        assert_of(twin, await served.rank(0, cn=0))
        assert_of(package, await served.rank(0, cn=1))
        served.cns.dead.clear()
        await served.publish(update)
        assert_of(twin, await served.rank(0, cn=1))

    async def test_a_batch_that_runs_meets_no_change(self, package, update, rig):
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
        publishing = asyncio.create_task(whole.publish(update))
        await asyncio.sleep(0.3)
        assert not publishing.done()
        gate.set()
        assert_of(package, await asked)
        await publishing
        assert (await whole.rank(0)).version == "2"

    async def test_an_hn_that_restarts_between_the_phases_gets_the_version(self, package, update, tmp_path, rig):
        """It came up before the update was listed, and the CNs ask it for what it was never told of."""
        served = await kit.ServedPackage(rig, package.folder).ready()

        def restart() -> None:
            served.hn_workers[0].stop(drain_s=0.0)
            wait_for(lambda: served.cores[0].metrics()["hns"] == 0)
            served.hns.refreshers = [served.hn("hn0")[1]]
            served.hns.dead.add(0)  # nor is it told to switch

        served.cns.after_stage = restart
        with pytest.raises(NotPublished, match="is published"):
            await served.publish(update)
        await served.ready()
        assert_of(kit.twin(package.folder, tmp_path / "twin"), await served.rank(0))

    async def test_workers_follow_the_journal_by_themselves(self, package, tmp_path, rig):
        """A replica that started while an update was published, and whom nobody told."""
        served = await kit.ServedPackage(rig, package.folder).ready()
        published(package, tmp_path, "2", "3")
        (cn,), (hn,) = served.cns.refreshers, served.hns.refreshers
        assert cn.is_behind()
        cn.catch_up()
        assert not cn.is_behind()
        answer = await served.rank(0)  # its HN does not have that version yet, and gets it
        assert hn.version == "3"
        assert_of(kit.twin(package.folder, tmp_path / "twin"), answer)

    async def test_an_hn_without_the_version_is_no_answer(self, package, update, tmp_path, rig):
        """The CN asks another one; a version that is nowhere is a clear error, never another version's scores."""
        served = await kit.ServedPackage(rig, package.folder, hns=2).ready()
        (cn,) = served.cns.refreshers
        served.hns.refreshers[1].stage(update)
        cn.stage(update)
        cn.switch("2")
        answers = [await served.rank(seed) for seed in range(6)]
        assert {answer.version for answer in answers} == {"2"}
        served.hns.refreshers[1].stage(kit.written(tmp_path / "v", kit.update(package, "1", "3", seed=3)))
        with pytest.raises(Exception, match="dense versions"):
            await served.rank(0)

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

    def test_a_crash_while_storing_leaves_the_old_version(self, package, update):
        """A half copied update, and one that was copied and not listed, are nothing; the next attempt replaces them.
        Who comes while another publishes is told to come again."""
        for leftover in (".2.partial", "2"):
            (package.folder / "updates" / leftover).mkdir(parents=True)
        assert open_live(package.folder, sparse=True, dense=True).version == "1"
        with Journal(package.folder).locked(), pytest.raises(NotPublished, match="another update"):
            publish(package, update, ())
        assert publish(package, update, ()) == "2"
        assert Journal(package.folder).versions() == ("2",)

    def test_an_update_that_lies_where_the_package_keeps_its_own_is_left_alone(self, package):
        """It would be deleted as a leftover before it is copied."""
        folder = kit.written(package.folder / "updates" / "2", kit.update(package, "1", "2", seed=2))
        with pytest.raises(BadUpdate, match="move it elsewhere"):
            publish(package, folder, ())
        assert (folder / "update.json").is_file()

    def test_a_copy_that_fails_leaves_nothing(self, package, update, monkeypatch):
        """A full disk, or an update whose file is missing (finding 12)."""
        (package.folder / "updates").mkdir()
        real = shutil.copyfile

        def fails(source, target):
            real(source, target)
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(shutil, "copyfile", fails)
        with pytest.raises(OSError, match="No space left"):
            Journal(package.folder).store(update, "2")
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


class TestClients:
    async def test_clients_hear_of_the_new_version_at_once(self, package, update, rig):
        """Without a request, and without a new connection; those that come later are greeted with it."""
        served = await kit.ServedPackage(rig, package.folder).ready()
        front = rig.front(served.cores[0])
        ranker = await rig.ranker(model="parts")
        served.on_version = lambda _: front.announce()
        assert ranker.card.version == "1"
        await served.publish(update)
        await until(lambda: ranker.card.version == "2")
        later = await rig.ranker(model="parts")
        assert later.card.version == "2"
        answer = await ranker.rank(kit.request(package, 0))
        assert answer.version == "2"

    async def test_hot_rows_follow(self, package, tmp_path, rig):
        """Rows that an HN keeps are sent anew when they have changed; the scores are those without a cache."""
        served = await kit.ServedPackage(
            rig, package.folder, knobs=kit.ALONE.model_copy(update={"cache_rows": 64})
        ).ready()
        for seed in range(20):
            await served.rank(seed)
        metrics = served.cores[0].metrics()
        assert metrics["cache_hits_total"] > 0
        rows = kit.only(kit.update(package, "1", "2", seed=2), "rows")
        await served.publish(kit.written(tmp_path / "u", rows))
        twin = kit.twin(package.folder, tmp_path / "twin")
        for seed in range(20):
            assert_of(twin, await served.rank(seed), seed)
        assert served.cores[0].metrics()["cache_hits_total"] > metrics["cache_hits_total"]


def test_no_change_is_made_inside_a_batch():
    """It waits, and is made before the next batch, though batches follow each other without a pause. One that fails
    leaves the next batch alone."""
    between, log = BatchBoundary(), []

    def change():
        with between:
            log.append("change")

    with between:
        thread = threading.Thread(target=change)
        thread.start()
        while not between._door.locked():
            pass
        log.append("batch")
    with between:
        log.append("next")
    thread.join()
    assert log == ["batch", "change", "next"]
    with pytest.raises(KeyError), between:
        raise KeyError
    with between:
        pass
