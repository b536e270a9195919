"""A package dealt to shards: the bits of one process before, during and after an update, and what does not fit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from plait_disagg.package import Package, PackageError
from plait_disagg.package.sharding import Sharding, held_pieces, plan_of, remote_tables
from plait_disagg.refresh.live_package import LivePackage, open_live
from plait_disagg.tables.errors import OtherVersion
from plait_disagg.tables.rows_wire import ShardIdentity
from support import refresh as kit
from support.tables import LocalShard

SHARDING = Sharding(shards=3)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A package with int8, float16 and float32 tables."""
    return kit.packaged(tmp_path_factory.mktemp("dealt") / "parts")


class Dealt:
    """A CN and its shards in this process."""

    def __init__(self, folder: Path, package: Package) -> None:
        plan = plan_of(package, SHARDING)
        self.shards = [
            open_live(folder, sparse=False, dense=False, pieces=partial(held_pieces, plan=plan, shard=number))
            for number in range(SHARDING.shards)
        ]
        self._local: dict[int, LocalShard] = {}
        self.cn = open_live(
            folder, sparse=True, dense=False, tables=partial(remote_tables, plan=plan, reach=self._reach)
        )

    def _reach(self, identity: ShardIdentity) -> LocalShard:
        live = self.shards[identity.shard]
        assert live.pieces is not None
        made = self._local[identity.shard] = LocalShard(live.pieces, live.version)
        return made

    def switch(self, number: int, update: Path) -> None:
        """One shard to the update's version."""
        self._local[number].version = _switched(self.shards[number], update)

    def scores(self, package: Package, seed: int) -> torch.Tensor:
        """What they give together with the package's dense half of the first version."""
        asked = kit.request(package, seed)
        assert self.cn.sparse is not None
        made = package.dense().run(self.cn.sparse.run([asked]), [asked.candidates])
        return next(iter(made.values()))


def _switched(live: LivePackage, update: Path) -> str:
    change = live.stage(live.read(update))
    change.touch()
    change.write()
    live.adopt(change)
    return change.version


def test_an_update_moves_no_bit_and_mixes_no_version(parts: Package, tmp_path: Path) -> None:
    """Scores have the bits of one process; between the first shard's switch and the last, nothing is answered."""
    folder = kit.copied(parts, tmp_path / "own")
    dealt = Dealt(folder, parts)
    for seed in range(5):
        assert torch.equal(dealt.scores(parts, seed), kit.scores(parts, kit.request(parts, seed)))
    rows = kit.only(kit.update(parts, "1", "2", seed=3), "rows")
    update = kit.written(tmp_path / "u", rows)
    for number in range(SHARDING.shards):
        dealt.switch(number, update)
        with pytest.raises(OtherVersion, match="has version 2, not 1"):
            for seed in range(5):
                dealt.scores(parts, seed)
    _switched(dealt.cn, update)
    fresh = open_live(folder, sparse=True, dense=False)
    _switched(fresh, update)
    assert fresh.sparse is not None
    for seed in range(5):
        asked = kit.request(parts, seed)
        wanted = parts.dense().run(fresh.sparse.run([asked]), [asked.candidates])
        assert torch.equal(dealt.scores(parts, seed), next(iter(wanted.values())))


def test_tables_that_do_not_fit_are_refused(parts: Package) -> None:
    """The sentence has the bytes, the shards, and what to change."""
    with pytest.raises(PackageError, match=r"do not fit into 3 shards of 100; give it more shards"):
        plan_of(parts, Sharding(shards=3, memory_bytes=100))
