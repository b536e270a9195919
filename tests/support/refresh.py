"""A packaged model whose every part can be refreshed, updates of it, and workers over it in this process."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self
from unittest import mock

import torch
from torch import nn

from plait_disagg.graph.costs import CutProblem
from plait_disagg.graph.edit import reads
from plait_disagg.graph.inputs import Bag, Dense, Ids, Input
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import LOOKUP
from plait_disagg.messages.check import check_request
from plait_disagg.package import write
from plait_disagg.package.read import Package, open_package
from plait_disagg.package.write import PackageOptions
from plait_disagg.protocols import SparseHalf
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.refresh.fold import fold_updates
from plait_disagg.refresh.journal import UPDATES, Journal
from plait_disagg.refresh.live_package import LivePackage, Refresher, open_live
from plait_disagg.refresh.publish import publish
from plait_disagg.refresh.update import Update, UpdatedRows, write_update
from plait_disagg.values import RankAnswer, RankRequest
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.whole import WholeCore
from support.rank_fabric import QUICK, Rig
from support.waiting import until

LIKED, ITEMS, KINDS, DIM = 60, 50, 10, 8

INPUTS: tuple[Input, ...] = (Dense("age", "user", (3,)), Bag("liked", "user", largest=10), Ids("item"), Ids("kind"))

ALONE = WorkerKnobs(largest_batch_rows=1)
"""No two requests share a batch: company moves bits, and these tests compare them."""


class Parts(nn.Module):
    """Pooled int8 rows, bare float32 and float16 rows, and layers on both sides of the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.liked = nn.EmbeddingBag(LIKED, DIM, mode="sum", include_last_offset=True)
        self.items = nn.Embedding(ITEMS, DIM)
        self.kinds = nn.Embedding(KINDS, DIM)
        self.user = nn.Linear(3, DIM)
        self.top = nn.Linear(3 * DIM, 1)

    def forward(
        self,
        age: torch.Tensor,
        liked: torch.Tensor,
        liked_offsets: torch.Tensor,
        item: torch.Tensor,
        kind: torch.Tensor,
    ) -> torch.Tensor:
        user = torch.relu(self.user(age) + self.liked(liked, liked_offsets))
        made: torch.Tensor = self.top(torch.cat([user, self.items(item), self.kinds(kind)], 1))
        return made.squeeze(1)


def module(seed: int = 5) -> nn.Module:
    """The model with random weights."""
    torch.manual_seed(seed)
    return Parts().eval()


def make() -> tuple[nn.Module, tuple[Input, ...]]:
    """As `plait models update` calls it: the model, retrained."""
    return module(6), INPUTS


def user_side(problem: CutProblem) -> frozenset[str]:
    """A `Cutter`: lookups and all that is the user's on the CN, so that the CN has weights too."""
    made_by = reads(problem.program)
    chosen: set[str] = set()
    for node in problem.program.nodes:
        wanted = node.op in (LOOKUP, SIZE) or node.rows == "user"
        if wanted and all(name in chosen for name in made_by[node.name] if name in made_by):
            chosen.add(node.name)
    return frozenset(chosen)


def packaged(folder: Path) -> Package:
    """`Parts` in ``folder``: takes a second or two; tests copy it."""
    options = PackageOptions(cutter="user", row_format={"liked": "int8", "kinds": "float16"})
    with mock.patch.object(write, "CUTTERS", {"user": user_side}):
        write.write_package(folder, module(), INPUTS, name="parts", options=options)
    return open_package(folder)


def copied(package: Path, folder: Path) -> Path:
    """A package of one's own."""
    shutil.copytree(package.folder, folder)
    return folder


def update(package: Package, base: str, version: str, seed: int) -> Update:
    """New rows for a third of every table, and all weights changed, so that every score differs."""
    chance = torch.Generator().manual_seed(seed)
    rows = {
        table.name: UpdatedRows(
            ids=torch.randperm(table.rows, generator=chance)[: table.rows // 3],
            rows=torch.randn(table.rows // 3, table.dim, generator=chance),
        )
        for table in package.tables.tables
    }
    constants = {
        name: tensor + torch.randn(tensor.shape, generator=chance) for name, tensor in package.constants.items()
    }
    return Update(model="parts", base=base, version=version, rows=rows, constants=constants)


def only(made: Update, what: str) -> Update:
    """Of an update ``all``, its ``rows``, or its ``weights``."""
    if what == "all":
        return made
    return replace(made, constants={}) if what == "rows" else replace(made, rows={})


def written(folder: Path, made: Update) -> Path:
    """The update on disk."""
    write_update(folder, made)
    return folder


def applied(live: LivePackage, made: Update) -> str:
    """The update staged and taken on, as workers do it; its version."""
    change = live.stage(made)
    change.touch()
    change.write()
    live.adopt(change)
    return change.version


def request(package: Package, seed: int = 0, candidates: int = 5) -> RankRequest:
    """A random request that every row of every table may be part of."""
    chance = torch.Generator().manual_seed(seed)
    liked = int(torch.randint(0, 11, (1,), generator=chance))
    tensors = {
        "age": torch.rand(1, 3, generator=chance),
        "liked": torch.randint(0, LIKED, (liked,), generator=chance),
        "liked_offsets": torch.tensor([0, liked]),
        "item": torch.randint(0, ITEMS, (candidates,), generator=chance),
        "kind": torch.randint(0, KINDS, (candidates,), generator=chance),
    }
    return check_request(package.card(), tensors, request_id=f"r{seed}")


def scores(package: Package, asked: RankRequest) -> torch.Tensor:
    """What a package that is opened fresh gives; the updates of its journal are not in it."""
    outputs = package.dense().run(package.sparse().run([asked]), [asked.candidates])
    return next(iter(outputs.values()))


def twin(folder: Path, out: Path) -> Package:
    """The naive twin of refreshed workers: a package with the journal's updates in its files."""
    fold_updates(folder, out)
    return open_package(out)


class RoleWorkersInProcess:
    """All workers of a role, as whoever publishes an update sees them (`Fleet`). An index in ``dead`` does not answer.
    `after_stage`: what happens then."""

    def __init__(self, refreshers: Sequence[Refresher]) -> None:
        self.refreshers = list(refreshers)
        self.dead: set[int] = set()
        self.after_stage: Callable[[], object] = lambda: None

    def stage(self, folder: Path) -> Mapping[str, Exception | None]:
        """See `Fleet`."""
        outcomes = self._all(lambda refresher: refresher.stage(folder))
        self.after_stage()
        return outcomes

    def switch(self, version: str) -> Mapping[str, Exception | None]:
        """See `Fleet`."""
        return self._all(lambda refresher: refresher.switch(version))

    def _all(self, step: Callable[[Refresher], None]) -> Mapping[str, Exception | None]:
        return {
            str(number): ConnectionError("no answer") if number in self.dead else _outcome(lambda r=refresher: step(r))
            for number, refresher in enumerate(self.refreshers)
        }


def _outcome(step: Callable[[], None]) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None


class ServedPackage:
    """The package at ``folder``, cut in two: HNs named hn0, hn1, ... and CNs, each with halves of its own.

    `hn_packages`: what each HN has loaded; `on_version` hears of the versions that CNs switch to.
    """

    def __init__(
        self,
        rig: Rig,
        folder: Path,
        *,
        cns: int = 1,
        hns: int = 1,
        knobs: WorkerKnobs = ALONE,
        prepares: bool = False,
    ) -> None:
        self.rig = rig
        self.folder = folder
        self.prepares = prepares
        self.knobs = knobs
        self.package = open_package(folder)
        self.names = [f"hn{number}" for number in range(hns)]
        self.hn_packages: list[LivePackage] = []
        self.on_version: Callable[[str], None] = lambda _: None
        hns_made = [self.hn(name) for name in self.names]
        self.hn_workers = [worker for worker, _ in hns_made]
        self.hns = RoleWorkersInProcess([refresher for _, refresher in hns_made])
        cores = [self.cn() for _ in range(cns)]
        self.cores = [core for core, _ in cores]
        self.cns = RoleWorkersInProcess([refresher for _, refresher in cores])
        self.rankers = [CoreRanker(core) for core in self.cores]

    def hn(self, name: str) -> tuple[HnWorker, Refresher]:
        """An HN that listens under the name, as one that starts now would come up."""
        live = open_live(self.folder, sparse=False, dense=True, prepares=self.prepares)
        self.hn_packages.append(live)
        found: list[Refresher] = []
        worker = HnWorker(
            live.card(),
            live.dense,
            [self.rig.listen(name)],
            catch_up=lambda: found[0].catch_up(),
            knobs=self.knobs,
        )
        self.rig.callback(worker.stop, drain_s=0.5)
        found.append(Refresher(live, worker))
        return worker, found[0]

    def cn(self) -> tuple[CnCore, Refresher]:
        """A CN, as one that starts now would come up."""
        live = open_live(self.folder, sparse=True, dense=False)
        assert live.sparse is not None
        core = CnCore(
            live.card(mode="split"),
            live.sparse,
            self.rig.connect(*self.names),
            hns=len(self.names),
            dense_version=live.dense_version,
            knobs=self.knobs,
            backoff=QUICK,
        )
        self.rig.callback(core.stop, drain_s=0.5)
        return core, Refresher(live, core, on_version=lambda version: self.on_version(version))

    async def ready(self) -> Self:
        """This, as soon as every CN has its HNs."""
        for core in self.cores:
            await until(lambda core=core: core.metrics()["hns"] == len(self.names))
        return self

    async def rank(self, seed: int, *, cn: int = 0) -> RankAnswer:
        """The answer to a request."""
        return await self.rankers[cn].rank(request(self.package, seed))

    async def publish(self, folder: Path) -> str:
        """Publishes an update while the event loop goes on."""
        return await asyncio.to_thread(publish, self.package, folder, (self.hns, self.cns))


class Whole:
    """The package at ``folder`` in one core."""

    def __init__(
        self,
        rig: Rig,
        folder: Path,
        *,
        knobs: WorkerKnobs = ALONE,
        around: Callable[[SparseHalf], SparseHalf] = lambda sparse: sparse,
    ) -> None:
        """`around` may put something before the CN half that it starts with."""
        live = open_live(folder, sparse=True, dense=True)
        assert live.sparse is not None
        self.package = live.package
        self.core = WholeCore(live.card(), around(live.sparse), live.dense[live.dense_version], knobs=knobs)
        rig.callback(self.core.stop, drain_s=0.5)
        self.workers = RoleWorkersInProcess([Refresher(live, self.core)])
        self.ranker = CoreRanker(self.core)

    async def ready(self) -> Self:
        """At once."""
        return self

    async def rank(self, seed: int, *, cn: int = 0) -> RankAnswer:  # there is only one
        """The answer to a request."""
        return await self.ranker.rank(request(self.package, seed))

    async def publish(self, folder: Path) -> str:
        """Publishes an update while the event loop goes on."""
        return await asyncio.to_thread(publish, self.package, folder, (self.workers,))


def version_twins(folder: Path, scratch: Path) -> dict[str, Package]:
    """The naive twin of every version that the package has been at, by version."""
    journal = Journal(folder)
    versions = (open_package(folder).manifest.version, *journal.versions())
    found: dict[str, Package] = {}
    for count in range(len(versions)):
        part = scratch / f"journal-{count}"
        shutil.copytree(folder, part)
        shutil.rmtree(part / UPDATES, ignore_errors=True)
        with Journal(part).locked():
            for version in versions[1 : count + 1]:
                Journal(part).store(journal.path(version), version)
                Journal(part).record(version)
        found[versions[count]] = twin(part, scratch / f"twin-{count}")
    return found
