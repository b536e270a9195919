"""A deterministic `Ranker` and an `ItemStore` that need no model, for tests and for trying clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import torch

from plait_disagg.errors import DeadlinePassed
from plait_disagg.graph.inputs import OFFSETS, Bag, Dense, Ids
from plait_disagg.values import ModelCard, RankAnswer, RankRequest, RankTimings
from plait_serving.ranking.local import ServedRanker

FAKE_CARD = ModelCard(
    name="picks",
    version="1",
    inputs=(
        Ids("person", side="user"),
        Dense("mood", side="user", shape=(3,)),
        Bag("history", side="user"),
        Ids("item"),
        Dense("price"),
        Bag("genres", largest=8),
    ),
    outputs={"score": (), "parts": (2,)},
    id_rows={"person": 50, "history": 20, "item": 20, "genres": 6},
    largest_candidates=1000,
    items=20,
)


def fake_outputs(request: RankRequest) -> dict[str, torch.Tensor]:
    """Return scores that depend on every number of the request: the user's, plus each candidate's own. Exact in float32
    for small integers and multiples of 1/8."""
    tensors = request.tensors
    user = tensors["person"].sum() + tensors["mood"].sum() * 8 + tensors["history"].sum() * 3
    offsets = tensors["genres" + OFFSETS]
    sums = torch.zeros(len(tensors["genres"]) + 1, dtype=torch.int64)
    torch.cumsum(tensors["genres"], 0, out=sums[1:])
    bags = sums[offsets[1:]] - sums[offsets[:-1]]
    own = tensors["item"] * 4 + bags * 2 + tensors["price"][:, 0] * 8
    scores = (own + user).to(torch.float32)
    return {"score": scores, "parts": torch.stack([own.to(torch.float32), user.expand(len(own)).float()], 1)}


class FakeRanker:
    """Answers with `fake_outputs` after `work_s`. `error`, if set, is raised instead; `missing` is the answer of
    `ready`; `ranked` and `cancelled` record requests."""

    card = FAKE_CARD

    def __init__(self, *, work_s: float = 0.0) -> None:
        self._work_s = work_s
        self.error: Exception | None = None
        self.missing: str | None = None
        self.ranked: list[RankRequest] = []
        self.cancelled: list[str] = []

    async def rank(self, request: RankRequest) -> RankAnswer:
        """Answer with `fake_outputs` after `work_s`, or raise `error` or `DeadlinePassed`."""
        if self.error is not None:
            raise self.error
        left_s = None if request.deadline_s is None else request.deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                await self._work(request)
        except TimeoutError as error:
            raise DeadlinePassed("the deadline passed before the answer was there") from error
        self.ranked.append(request)
        timings = RankTimings(queued_ms=0.5, lookup_ms=1.0, wire_ms=0.25, dense_ms=2.0)
        return RankAnswer(outputs=fake_outputs(request), timings=timings, bytes_crossed=64 * request.candidates)

    async def _work(self, request: RankRequest) -> None:
        try:
            await asyncio.sleep(self._work_s)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise

    async def ready(self) -> str | None:
        """Return `missing`."""
        return self.missing

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers of requests ranked and waiting."""
        return {"requests_total": float(len(self.ranked)), "waiting": 0.0}

    async def close(self, *, drain_s: float) -> None:
        """Do nothing: nothing waits."""


class FakeItems:
    """Item i: price i / 8, the genres 0 ... i mod 4 - 1 (none for every fourth item)."""

    def __init__(self, *, named: bool = True) -> None:
        self._named = named

    def __len__(self) -> int:
        return 20

    def gather(self, ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Compute the features of these items."""
        bags = [torch.arange(int(i) % 4) for i in ids]
        lengths = torch.tensor([0] + [len(bag) for bag in bags])
        return {
            "item": ids.clone(),
            "price": (ids / 8).to(torch.float32)[:, None],
            "genres": torch.cat(bags) if bags else torch.empty(0, dtype=torch.int64),
            "genres" + OFFSETS: torch.cumsum(lengths, 0),
        }

    def names(self, ids: Sequence[int]) -> Sequence[str] | None:
        """Return `item number i` for each id, or None without names."""
        return [f"item number {i}" for i in ids] if self._named else None


def fake_rankers(ranker: FakeRanker | None = None, *, items: bool = True) -> dict[str, ServedRanker]:
    """Return one model in the form that `LocalRankingService` takes."""
    ranker = ranker or FakeRanker()
    return {ranker.card.name: ServedRanker(ranker=ranker, items=FakeItems() if items else None)}
