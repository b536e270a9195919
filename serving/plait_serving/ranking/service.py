"""The interface between the routers and what ranks: rankers in this process, or beyond a fabric.

Imports neither FastAPI nor torch, so a command, a test or a replica can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plait_disagg.errors import RankError
from plait_disagg.protocols import ItemStore, Ranker


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


async def why_not_ready(ranker: Ranker) -> str | None:
    """Return None if the ranker would answer now, else the reason. A ranker that raises would not."""
    try:
        return await ranker.ready()
    except RankError as error:
        return error.message
