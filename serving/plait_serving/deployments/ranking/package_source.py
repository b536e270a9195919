"""From a packaged model's folder to what a worker runs. The module imports no torch; opening a package does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plait_serving.ranking.config import RankExecutor, RankRole

if TYPE_CHECKING:
    from plait_disagg.package.read import Package
    from plait_disagg.package.sharding import Sharding
    from plait_disagg.protocols import DenseHalf, SparseHalf
    from plait_disagg.refresh.live_package import LivePackage
    from plait_disagg.tables.pieces import HeldPieces
    from plait_disagg.tables.protocols import ShardTables
    from plait_disagg.tables.rows_wire import ShardIdentity
    from plait_disagg.values import ModelCard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """How a model's tables are dealt, for one process: the `shard` that it is, or, for a CN, what reaches each."""

    sharding: Sharding
    shard: int = 0
    reach: Callable[[ShardIdentity], ShardTables] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPackage:
    """A model's card and the halves that a role needs. `live` is where they come from, if they can be refreshed.
    `identity`, `pieces`: of a shard."""

    card: ModelCard
    sparse: SparseHalf | None = None
    dense: DenseHalf | None = None
    live: LivePackage | None = None
    identity: ShardIdentity | None = None
    pieces: HeldPieces | None = None

    @property
    def dense_version(self) -> str:
        """The version of `dense`, and of the dense half that belongs to `sparse`."""
        return "" if self.live is None else self.live.dense_version


class RankSource(Protocol):
    """A picklable recipe for a model; it travels to the replicas and is opened there."""

    def open(self, role: RankRole, sharded: ShardedModel | None = None) -> OpenedPackage:
        """Load what the role needs, and nothing else."""

    def package(self) -> Package | None:
        """Return the package, for the ingress: it knows the items by id, and what updates are checked against before
        they are published. None: the model has no such items, and cannot be refreshed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """What the ingress needs to know about a ranking model.

    `workers`: Serve's handle of the deployment that receives requests.
    `hns`: the handle of the HNs behind it; None if there are none. `shards`: those of its tables' shards.
    """

    source: RankSource
    workers: Any
    hns: Any
    shards: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A folder made by `plait models package`. With `device` "auto", dense halves use CUDA if available; with
    `executor` "auto", those on the CPU run on prepared programs where these are faster."""

    folder: Path
    device: str = "auto"
    executor: RankExecutor = "auto"

    def open(self, role: RankRole, sharded: ShardedModel | None = None) -> OpenedPackage:
        """Load the role's halves from the folder, with the updates that the package has received. Raises
        `PackageError`."""
        from plait_disagg.refresh.live_package import open_live
        from plait_kernels.devices import default_device

        if sharded is not None:
            return _opened_sharded(self.folder, sharded)
        device = self.device if self.device != "auto" else default_device()
        prepares = self.executor == "auto"
        live = open_live(self.folder, sparse=role != "hn", dense=role != "cn", device=device, prepares=prepares)
        return OpenedPackage(
            card=live.card(mode="whole" if role == "whole" else "split"),
            sparse=live.sparse,
            dense=live.dense.get(live.dense_version),
            live=live,
        )

    def package(self) -> Package:
        """Return the folder's package. Raises `PackageError`."""
        from plait_disagg.package.read import open_package

        return open_package(self.folder, ahead=False)  # no row of its tables is looked up


def _opened_sharded(folder: Path, sharded: ShardedModel) -> OpenedPackage:
    """Open the CN half of a model whose tables are elsewhere, or what one of its shards holds."""
    from plait_disagg.package.read import open_package
    from plait_disagg.package.sharding import identity, plan_of, remote_tables
    from plait_disagg.refresh.live_package import open_live
    from plait_disagg.tables.pieces import HeldPieces

    package = open_package(folder, ahead=False)
    plan = plan_of(package, sharded.sharding)
    if sharded.reach is None:
        mine = plan.of_shard(sharded.shard)
        live = open_live(folder, sparse=False, dense=False, pieces=lambda it: HeldPieces(it.tables, mine))
        who = identity(package, plan, sharded.shard)
        return OpenedPackage(card=live.card(), live=live, identity=who, pieces=live.pieces)
    tables = partial(remote_tables, plan=plan, reach=sharded.reach)
    live = open_live(folder, sparse=True, dense=False, tables=tables)
    return OpenedPackage(card=live.card(mode="split"), sparse=live.sparse, live=live)
