"""The seam between the routers and whatever ranks: rankers in this process, or beyond a fabric.

Imports neither FastAPI nor torch, so a command, a test or a replica can use it alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from plait_disagg.errors import RankError
from plait_disagg.graph.inputs import Input, Side
from plait_disagg.protocols import ItemStore, Ranker
from plait_disagg.values import ModelCard
from plait_serving.health import Health

if TYPE_CHECKING:
    from plait_serving.ranking.inputs import Binder  # holds tensors

__all__ = ["BoundModel", "RankingService", "Refreshes", "ServedRanker", "why_not_ready"]


class Refreshes(Protocol):
    """Publishes updates of a model to whatever serves it."""

    async def refresh(self, update: Path) -> str:
        """Publishes the update in that folder of the server's machine; returns the version that is served from now on.
        Raises `RefreshError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRanker:
    """A model that is served. ``items``: the items it knows by id, None if it knows none. ``refreshes``: None if the
    model stays as it is."""

    ranker: Ranker
    items: ItemStore | None = None
    refreshes: Refreshes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundModel:
    """A model with its card of this moment, and what turns arrays into its tensors: all of them, or one side's.

    ``name`` is what requests call it; the card says what it was packaged as.
    """

    name: str
    ranker: Ranker
    items: ItemStore | None
    card: ModelCard
    binder: Binder
    user: Binder
    item: Binder

    def side(self, side: Side) -> tuple[Input, ...]:
        """The inputs of one side."""
        return tuple(item for item in self.card.inputs if item.side == side)


class RankingService(Protocol):
    """Finds the models that rank. All methods may be called from many tasks of one event loop at once."""

    def names(self) -> tuple[str, ...]:
        """What requests may call the models; they may come and go while the server runs."""

    def get(self, name: str, version: str | None = None) -> BoundModel:
        """The model as it is now. Cheap: it is asked for with every request.

        Raises `UnknownModel`, and whatever the ranker says if it has no card yet.
        """

    def refreshes(self, name: str) -> Refreshes | None:
        """What refreshes the model, if anything does. Raises `UnknownModel`."""

    async def health(self) -> Health:
        """Ready if every model would answer now. Never blocks on a queue."""

    async def metrics_text(self) -> str:
        """The service's own metrics in Prometheus' text format; may be empty."""


async def why_not_ready(ranker: Ranker) -> str | None:
    """None if the ranker would answer now. A ranker that raises is one that would not."""
    try:
        return await ranker.ready()
    except RankError as error:
        return error.message
