"""The recommendation models of a server: found by name and version, each with what its requests need.

The seam between the routers and whatever ranks: `plait_disagg.protocols.Ranker`, in this process or beyond a
fabric. `plait_serving.ranking.testing` has a fake one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from plait_disagg.errors import RankError, UnknownModel
from plait_disagg.graph.inputs import Input, Side
from plait_disagg.protocols import ItemStore, Ranker
from plait_disagg.values import ModelCard

if TYPE_CHECKING:
    from plait_serving.ranking.inputs import Binder

__all__ = ["Bound", "Recommender", "Recommenders", "Refreshes"]


class Refreshes(Protocol):
    """Publishes updates of a model to whatever serves it."""

    async def refresh(self, update: Path) -> str:
        """Publishes the update in that folder of the server's machine; returns the version that is served from now on.
        Raises `RefreshError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommender:
    """A model that is served. ``items``: the items it knows by id, None if it knows none. ``refreshes``: None if the
    model stays as it is."""

    ranker: Ranker
    items: ItemStore | None = None
    refreshes: Refreshes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
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


class Recommenders:
    """The models by name. The mapping may change while it is used.

    Cheap to ask: what hangs on a card is made again only when the card is another one.
    """

    def __init__(self, models: Mapping[str, Recommender]) -> None:
        self._models = models
        self._bound: dict[str, Bound] = {}

    def __bool__(self) -> bool:
        return bool(self._models)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._models))

    def refreshes(self, name: str) -> Refreshes | None:
        """What refreshes the model, if it can be. Raises `UnknownModel`."""
        return self._named(name).refreshes

    def _named(self, name: str) -> Recommender:
        model = self._models.get(name)
        if model is None:
            known = ", ".join(self._models) or "none"
            raise UnknownModel(f"there is no model {name[:100]!r} that ranks; there is: {known}", param="model")
        return model

    def get(self, name: str, version: str | None = None) -> Bound:
        """Raises `UnknownModel`, and whatever the ranker says if it has no card yet."""
        model = self._named(name)
        card = model.ranker.card
        bound = self._bound.get(name)
        if bound is None or bound.card is not card or bound.ranker is not model.ranker:
            bound = self._bound[name] = _bind(name, model, card)
        if version is not None and version != card.version:
            told = f"model {name!r} has no version {version[:100]!r}; it is at {card.version!r}"
            raise UnknownModel(told, param="model")
        return bound

    async def missing(self) -> str | None:
        """None if every model would answer now; else which would not, and why."""
        for name, model in tuple(self._models.items()):
            reason = await why_not_ready(model.ranker)
            if reason is not None:
                return f"model {name}: {reason}"
        return None

    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """What every ranker counts, by model."""
        return {name: model.ranker.metrics() for name, model in tuple(self._models.items())}


async def why_not_ready(ranker: Ranker) -> str | None:
    """None if the ranker would answer now. A ranker that raises is one that would not."""
    try:
        return await ranker.ready()
    except RankError as error:
        return error.message


def _bind(name: str, model: Recommender, card: ModelCard) -> Bound:
    from plait_serving.ranking.inputs import Binder  # brings torch, which a server that ranks nothing can do without

    def binder(*sides: Side) -> Binder:
        inputs = [item for item in card.inputs if item.side in sides]
        return Binder(inputs, largest_candidates=card.largest_candidates)

    return Bound(
        name=name,
        ranker=model.ranker,
        items=model.items,
        card=card,
        binder=binder("user", "item"),
        user=binder("user"),
        item=binder("item"),
    )
