"""From a packaged model's folder to what a worker runs. The module imports no torch; opening does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from plait_serving.ranking.config import RankRole

if TYPE_CHECKING:
    from plait_disagg.package.read import Package
    from plait_disagg.protocols import DenseHalf, ItemStore, SparseHalf
    from plait_disagg.refresh.live_package import LivePackage
    from plait_disagg.values import ModelCard

__all__ = ["OpenedPackage", "PackageSource", "RankModel", "RankSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPackage:
    """A model's card and the halves that a role needs. ``live``: where they come from, if they can be refreshed."""

    card: ModelCard
    sparse: SparseHalf | None = None
    dense: DenseHalf | None = None
    live: LivePackage | None = None

    @property
    def dense_version(self) -> str:
        """Of `dense`, and of the dense half that belongs to `sparse`."""
        return "" if self.live is None else self.live.dense_version

    @property
    def dense_versions(self) -> Mapping[str, DenseHalf]:
        """`dense` and those that were served before it."""
        return {} if self.live is None else self.live.dense


class RankSource(Protocol):
    """A picklable recipe of a model; it travels to the replicas and is opened there."""

    def open(self, role: RankRole) -> OpenedPackage:
        """Loads what the role needs, and nothing else."""

    def items(self) -> ItemStore | None:
        """The items that the model knows by id, for the ingress."""

    def package(self) -> Package | None:
        """What updates are checked against before they are published; None: the model can not be refreshed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """What the ingress must know of a recommendation model besides its workers' handle: there are ``replicas`` or more,
    up to ``max_replicas``."""

    source: RankSource
    replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A folder that ``plait models package`` made. ``device`` "auto": CUDA for dense halves if there is one."""

    folder: Path
    device: str = "auto"

    def open(self, role: RankRole) -> OpenedPackage:
        """See RankSource; with the updates that the package has had. Raises `PackageError`."""
        import torch

        from plait_disagg.refresh.live_package import open_live

        device = self.device if self.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        live = open_live(self.folder, sparse=role != "hn", dense=role != "cn", device=device)
        return OpenedPackage(
            card=live.card(mode="whole" if role == "whole" else "split"),
            sparse=live.sparse,
            dense=live.dense.get(live.dense_version),
            live=live,
        )

    def items(self) -> ItemStore | None:
        """See RankSource. Raises `PackageError`."""
        from plait_disagg.package.read import open_package

        return open_package(self.folder).items

    def package(self) -> Package | None:
        """See RankSource. Raises `PackageError`."""
        from plait_disagg.package.read import open_package

        return open_package(self.folder)
