"""The tiny model of `fakes.ranking_model` as a recipe that Serve can carry to its replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fakes import ranking_model as kit
from plait_disagg.package import Package
from plait_serving.deployments.ranking.package_source import OpenedPackage, ShardedModel
from plait_serving.ranking.config import RankRole


@dataclass(frozen=True, slots=True)
class TinySource:
    """A `RankSource`. ``slow_s``: how long a batch of its sparse half takes at least."""

    slow_s: float = 0.0

    def open(self, role: RankRole, sharded: ShardedModel | None = None) -> OpenedPackage:
        """See RankSource."""
        return OpenedPackage(
            card=replace(kit.CARD, name="whatever its maker called it"),
            sparse=None if role == "hn" else kit.FakeSparse(slow_s=self.slow_s),
            dense=None if role == "cn" else kit.FakeDense(),
        )

    def package(self) -> Package | None:
        """See RankSource."""
        return None
