"""From a packaged model's folder to what a worker runs. The module imports no torch; opening a package does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait_serving.ranking.config import RankExecutor, RankRole

if TYPE_CHECKING:
    from plait_disagg.package.read import Package
    from plait_disagg.package.sharding import Sharding
    from plait_disagg.refresh.live_package import LivePackage
    from plait_disagg.tables.protocols import ShardTables
    from plait_disagg.tables.rows_wire import ShardIdentity


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A folder made by `plait models package`; it travels to the replicas and is opened there. With `device` "auto",
    dense halves use CUDA if available; with `executor` "auto", those on the CPU run on prepared programs where these
    are faster."""

    folder: Path
    device: str = "auto"
    executor: RankExecutor = "auto"

    def open(self, role: RankRole) -> LivePackage:
        """Load the role's halves from the folder, with the updates that the package has received. Raises
        `PackageError`."""
        from plait_disagg.refresh.live_package import open_live
        from plait_kernels.devices import default_device

        device = self.device if self.device != "auto" else default_device()
        prepares = self.executor == "auto"
        return open_live(self.folder, sparse=role != "hn", dense=role != "cn", device=device, prepares=prepares)

    def open_sharded(
        self, sharding: Sharding, shard: int, reach: Callable[[ShardIdentity], ShardTables] | None
    ) -> LivePackage:
        """Load what a `shard` of the tables holds; or, with what reaches each, the CN half without tables. Raises
        `PackageError`."""
        from plait_disagg.package.sharding import plan_of, remote_tables
        from plait_disagg.refresh.live_package import LivePackage
        from plait_disagg.tables.pieces import HeldPieces

        package = self.package()
        plan = plan_of(package, sharding)
        if reach is None:
            return LivePackage(package, pieces=HeldPieces(package.tables, plan.of_shard(shard)))
        tables = remote_tables(package, plan, reach)
        return LivePackage(package, sparse=package.sparse(tables), tables=tables)

    def package(self) -> Package:
        """Return the package as it was written: for the ingress, it knows the items by id, and what updates are checked
        against before they are published. Raises `PackageError`."""
        from plait_disagg.package.read import open_package

        return open_package(self.folder)
