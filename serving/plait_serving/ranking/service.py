"""The interface between the routers and what ranks: rankers in this process, or beyond a fabric.

Imports neither FastAPI nor torch, so a command, a test or a replica can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from plait_disagg.errors import RankError
from plait_disagg.graph.inputs import Input, Side
from plait_disagg.protocols import ItemStore, Ranker
from plait_disagg.values import ModelCard

if TYPE_CHECKING:
    from plait_serving.ranking.inputs import Binder  # holds tensors


class Refreshes(Protocol):
    """Publishes updates of a model to whatever serves it."""

    async def refresh(self, update: Path) -> str:
        """Publish the update in that folder of the server's machine; return the version that is served from now on.
        Raises `RefreshError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRanker:
    """A model that is served. `items`: the items it knows by id, None if it knows none. `refreshes`: None if the model
    cannot be refreshed."""

    ranker: Ranker
    items: ItemStore | None = None
    refreshes: Refreshes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundModel:
    """A model with its current card, and the binders that turn arrays into its tensors: all of them, or one side's.

    `name` is its name in requests; the card has the name that it was packaged with.
    """

    name: str
    ranker: Ranker
    items: ItemStore | None
    card: ModelCard
    binder: Binder
    user: Binder
    item: Binder

    def side(self, side: Side) -> tuple[Input, ...]:
        """Return the inputs of one side."""
        return tuple(item for item in self.card.inputs if item.side == side)


async def why_not_ready(ranker: Ranker) -> str | None:
    """Return None if the ranker would answer now, else the reason. A ranker that raises would not."""
    try:
        return await ranker.ready()
    except RankError as error:
        return error.message
