"""From a packaged model's folder to what a worker runs. The module imports no torch; opening does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from plait_serving.recommend_config import RankRole

if TYPE_CHECKING:
    from plait_disagg.workers.protocols import DenseHalf, ItemStore, SparseHalf
    from plait_disagg.workers.values import ModelCard

__all__ = ["Opened", "PackageSource", "RankSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model's card and the halves that a role needs."""

    card: ModelCard
    sparse: SparseHalf | None = None
    dense: DenseHalf | None = None


class RankSource(Protocol):
    """A picklable recipe of a model; it travels to the replicas and is opened there."""

    def open(self, role: RankRole) -> Opened:
        """Loads what the role needs, and nothing else."""

    def items(self) -> ItemStore | None:
        """The items that the model knows by id, for the ingress."""


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A folder that ``plait models package`` made. ``device`` "auto": CUDA for dense halves if there is one."""

    folder: Path
    device: str = "auto"

    def open(self, role: RankRole) -> Opened:
        """See RankSource. Raises `PackageError`."""
        import torch

        from plait_disagg.package.read import open_package

        package = open_package(self.folder)
        device = self.device if self.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        return Opened(
            card=package.card(mode="whole" if role == "whole" else "split"),
            sparse=None if role == "hn" else package.sparse(),
            dense=None if role == "cn" else package.dense(device),
        )

    def items(self) -> ItemStore | None:
        """See RankSource. Raises `PackageError`."""
        from plait_disagg.package.read import open_package

        return open_package(self.folder).items
