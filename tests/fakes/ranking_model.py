"""A small recommendation model in two halves, computed the slow and obvious way, and requests for it.

Its score of a candidate is (sum of the rows of the user's genres + the candidate's row and tags) . w + age + price.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import torch

from plait_disagg.graph.inputs import Bag, Dense, Ids, Input
from plait_disagg.graph.program import Port
from plait_disagg.messages.check import check_request
from plait_disagg.queue.batch import join
from plait_disagg.tables.values import Table
from plait_disagg.values import ModelCard, RankRequest

ROWS, DIM = 1000, 16

INPUTS: tuple[Input, ...] = (
    Dense("age", side="user"),
    Bag("genres", side="user", largest=50),
    Ids("item", side="item"),
    Dense("price", side="item"),
    Bag("tags", side="item", largest=20),
)

CARD = ModelCard(
    name="tiny",
    version="1",
    inputs=INPUTS,
    outputs={"score": (), "pair": (2,)},
    largest_candidates=5000,
    id_rows={"item": ROWS},
)

TABLE = torch.arange(ROWS * DIM, dtype=torch.float32).reshape(ROWS, DIM).mul(0.37).sin()
WEIGHT = torch.linspace(-1.0, 1.0, DIM)


class FakeSparse:
    """A `SparseHalf`. An item id in ``poison`` makes a batch fail; ``slow_s`` is how long each batch takes at least."""

    row_ports: Mapping[str, Table] = {}

    def __init__(self, *, poison: frozenset[int] = frozenset(), slow_s: float = 0.0) -> None:
        self.poison = poison
        self.slow_s = slow_s
        self.batches: list[int] = []
        self.entered = 0
        self.gate = threading.Event()
        self.gate.set()

    def run(self, requests: Sequence[RankRequest]) -> Mapping[str, torch.Tensor]:
        """See SparseHalf."""
        self.entered += 1
        self.gate.wait(60)
        time.sleep(self.slow_s)
        self.batches.append(len(requests))
        batch = join(INPUTS, requests)
        if self.poison & set(batch["item"].tolist()):
            raise RuntimeError("poison")
        return {
            "user": pooled(batch["genres"], batch["genres_offsets"]),
            "age": batch["age"],
            "item": TABLE[batch["item"]] + pooled(batch["tags"], batch["tags_offsets"]),
            "price": batch["price"],
        }

    def run_ids(self, requests: Sequence[RankRequest]) -> Mapping[str, torch.Tensor]:
        """See SparseHalf: no rows cross."""
        raise NotImplementedError

    def rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """See SparseHalf: no rows cross."""
        raise NotImplementedError


class FakeDense:
    """A `DenseHalf`. A price of ``poison`` makes a batch fail; `gate` holds batches up while it is not set."""

    crossing: tuple[Port, ...] = (
        Port(name="user", shape=(-1, DIM), dtype="float32", rows="user"),
        Port(name="age", shape=(-1, 1), dtype="float32", rows="user"),
        Port(name="item", shape=(-1, DIM), dtype="float32", rows="item"),
        Port(name="price", shape=(-1, 1), dtype="float32", rows="item"),
    )

    def __init__(self, *, poison: float | None = None) -> None:
        self.poison = poison
        self.batches: list[tuple[int, ...]] = []
        self.gate = threading.Event()
        self.gate.set()

    def run(self, crossing: Mapping[str, torch.Tensor], candidates: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """See DenseHalf."""
        self.gate.wait(60)
        self.batches.append(tuple(candidates))
        if self.poison is not None and bool((crossing["price"] == self.poison).any()):
            raise RuntimeError("poison")
        user_of = torch.repeat_interleave(torch.arange(len(candidates)), torch.tensor(list(candidates)))
        user = crossing["user"][user_of] + crossing["item"]
        score = (user * WEIGHT).sum(1) + crossing["age"][user_of, 0] + crossing["price"][:, 0]
        return {"score": score, "pair": torch.stack([score, -score], 1)}

    def metrics(self) -> Mapping[str, float]:
        """See DenseHalf."""
        return {}


def pooled(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sum of the rows of each bag."""
    return torch.stack([TABLE[ids[offsets[r] : offsets[r + 1]] % ROWS].sum(0) for r in range(offsets.shape[0] - 1)])


def tensors(seed: int = 0, candidates: int = 3) -> dict[str, torch.Tensor]:
    """Random inputs; a bag has none to four ids."""
    chance = torch.Generator().manual_seed(seed)

    def bag(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(0, 5, (rows,), generator=chance)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return torch.randint(0, ROWS, (int(offsets[-1]),), generator=chance), offsets

    genres, genres_offsets = bag(1)
    tags, tags_offsets = bag(candidates)
    return {
        "age": torch.rand(1, 1, generator=chance),
        "genres": genres,
        "genres_offsets": genres_offsets,
        "item": torch.randint(0, ROWS, (candidates,), generator=chance),
        "price": torch.rand(candidates, 1, generator=chance),
        "tags": tags,
        "tags_offsets": tags_offsets,
    }


def request(
    seed: int = 0,
    candidates: int = 3,
    *,
    deadline_s: float | None = None,
    changes: Mapping[str, torch.Tensor] | None = None,
) -> RankRequest:
    """A checked request."""
    made = {**tensors(seed, candidates), **(changes or {})}
    return check_request(CARD, made, request_id=f"r{seed}", deadline_s=deadline_s)


def expected(asked: RankRequest) -> Mapping[str, torch.Tensor]:
    """What a request's answer is, computed alone."""
    return FakeDense().run(FakeSparse().run([asked]), [asked.candidates])
