"""Rankers by the names of their models; where their workers run is up to the rankers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Metric

from plait_disagg.errors import RankError, UnknownModel
from plait_disagg.graph.inputs import Input, Side
from plait_disagg.protocols import ItemStore, Ranker
from plait_disagg.values import ModelCard
from plait_serving.health import Health
from plait_serving.ranking.counted import rank_families
from plait_serving.ranking.inputs import Binder

Refresh = Callable[[Path], Awaitable[str]]
"""Publishes the update in that folder of the server's machine; returns the version that is served from now on. Raises
`RefreshError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRanker:
    """A model that is served. `items`: the items it knows by id, None if it knows none. `refresh`: None if the model
    cannot be refreshed."""

    ranker: Ranker
    items: ItemStore | None = None
    refresh: Refresh | None = None


async def why_not_ready(ranker: Ranker) -> str | None:
    """Return None if the ranker would answer now, else the reason. A ranker that raises would not."""
    try:
        return await ranker.ready()
    except RankError as error:
        return error.message


class BoundModel:
    """A model with its current card, and the binder that turns arrays into its tensors.

    `name` is its name in requests; the card has the name that it was packaged with.
    """

    def __init__(self, name: str, model: ServedRanker, card: ModelCard) -> None:
        self.name, self.card = name, card
        self.ranker, self.items = model.ranker, model.items
        self.binder = Binder(card.inputs)

    def side(self, side: Side) -> tuple[Input, ...]:
        """Return the inputs of one side."""
        return tuple(item for item in self.card.inputs if item.side == side)


class LocalRankingService:
    """The models by name. The mapping may change while it is used.

    Lookups are cheap: what depends on a card is rebuilt only when the card changes.
    """

    def __init__(self, models: Mapping[str, ServedRanker]) -> None:
        self._models = models
        self._bound: dict[str, BoundModel] = {}

    def names(self) -> tuple[str, ...]:
        """Return the models' names in requests."""
        return tuple(self._models)

    def get(self, name: str, version: str | None = None) -> BoundModel:
        """Return the model with its current card. Raises `UnknownModel`, or the ranker's error if it has no card."""
        model = self._named(name)
        card = model.ranker.card
        bound = self._bound.get(name)
        if bound is None or bound.card is not card or bound.ranker is not model.ranker:
            bound = self._bound[name] = BoundModel(name, model, card)
        if version is not None and version != card.version:
            message = f"model {name!r} has no version {version[:100]!r}; it is at {card.version!r}"
            raise UnknownModel(message, param="model")
        return bound

    def refresh(self, name: str) -> Refresh | None:
        """Return what refreshes the model, or None if nothing does. Raises `UnknownModel`."""
        return self._named(name).refresh

    async def health(self) -> Health:
        """Return ready if every model would answer now; else those that would not, and why."""
        models = tuple(self._models.items())
        reasons = await asyncio.gather(*(why_not_ready(model.ranker) for _, model in models))
        missing = [f"model {name}: {why}" for (name, _), why in zip(models, reasons, strict=True) if why is not None]
        return Health(ready=not missing, reason="; ".join(missing) or None)

    async def metric_families(self) -> Sequence[Metric]:
        """Return one metric `plait_ranker_NAME` for each thing that the rankers count."""
        return rank_families("plait_ranker", {name: it.ranker.metrics() for name, it in tuple(self._models.items())})

    def _named(self, name: str) -> ServedRanker:
        model = self._models.get(name)
        if model is None:
            known = ", ".join(self._models) or "none"
            raise UnknownModel(f"there is no model {name[:100]!r} that ranks; there is: {known}", param="model")
        return model
