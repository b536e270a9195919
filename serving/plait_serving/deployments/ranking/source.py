"""From a packaged model's folder to what a worker runs. The module imports no torch; opening a package does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plait_serving.ranking.config import RankExecutor, RankRole

if TYPE_CHECKING:
    from plait_disagg.package.read import Package
    from plait_disagg.protocols import DenseHalf, ItemStore, SparseHalf
    from plait_disagg.refresh.live_package import LivePackage
    from plait_disagg.values import ModelCard

__all__ = ["OpenedPackage", "PackageSource", "RankModel", "RankSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPackage:
    """A model's card and the halves that a role needs. `live` is where they come from, if they can be refreshed."""

    card: ModelCard
    sparse: SparseHalf | None = None
    dense: DenseHalf | None = None
    live: LivePackage | None = None

    @property
    def dense_version(self) -> str:
        """The version of `dense`, and of the dense half that belongs to `sparse`."""
        return "" if self.live is None else self.live.dense_version

    @property
    def dense_versions(self) -> Mapping[str, DenseHalf]:
        """`dense` and the dense halves that were served before it."""
        return {} if self.live is None else self.live.dense


class RankSource(Protocol):
    """A picklable recipe for a model; it travels to the replicas and is opened there."""

    def open(self, role: RankRole) -> OpenedPackage:
        """Load what the role needs, and nothing else."""

    def items(self) -> ItemStore | None:
        """Return the items that the model knows by id, for the ingress."""

    def package(self) -> Package | None:
        """Return the package that updates are checked against before they are published; None if it cannot be
        refreshed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """What the ingress needs to know about a ranking model.

    `workers`: Serve's handle of the deployment that receives requests, with `replicas` to `max_replicas` replicas.
    `hns`: the handle of the HNs behind it; None if there are none.
    """

    source: RankSource
    workers: Any
    hns: Any
    replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A folder made by `plait models package`. With `device` "auto", dense halves use CUDA if available; with
    `executor` "auto", those on the CPU run on prepared programs where these are faster."""

    folder: Path
    device: str = "auto"
    executor: RankExecutor = "auto"

    def open(self, role: RankRole) -> OpenedPackage:
        """Load the role's halves from the folder, with the updates that the package has received. Raises
        `PackageError`."""
        import torch

        from plait_disagg.refresh.live_package import open_live

        device = self.device if self.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        prepares = self.executor == "auto"
        live = open_live(self.folder, sparse=role != "hn", dense=role != "cn", device=device, prepares=prepares)
        return OpenedPackage(
            card=live.card(mode="whole" if role == "whole" else "split"),
            sparse=live.sparse,
            dense=live.dense.get(live.dense_version),
            live=live,
        )

    def items(self) -> ItemStore | None:
        """Return the package's items. Raises `PackageError`."""
        from plait_disagg.package.read import open_package

        return open_package(self.folder).items

    def package(self) -> Package | None:
        """Return the folder's package. Raises `PackageError`."""
        from plait_disagg.package.read import open_package

        return open_package(self.folder)
