"""The model `picks`: a small DLRM over a person and a film, with its trained state and the films' features.

Symbols: B rows, D width of every vector. Four vectors of the person (age band, liked genres, history, daypart) meet
three of the film (itself, its genres, its year and popularity) in `Match`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from plait_disagg.graph.inputs import Bag, Dense, Ids, Input
from plait_serving.starter.manifest import WEIGHTS
from plait_serving.starter.words import AGE_BANDS, DAYPARTS, GENRES

FOLDER = WEIGHTS / "recommend"
STATE = "picks.safetensors"
ITEMS = "items.safetensors"
LONGEST_HISTORY = 30
DIM = 16
FILMS = 2000

INPUTS: tuple[Input, ...] = (
    Ids("age_band", side="user"),
    Bag("liked_genres", side="user", largest=len(GENRES)),
    Bag("history", side="user", largest=4 * LONGEST_HISTORY),
    Ids("daypart", side="user"),
    Ids("item", side="item"),
    Bag("genres", side="item", largest=len(GENRES)),
    Dense("year", side="item"),
    Dense("popularity", side="item"),
)


class Match(nn.Module):
    """A logit per row from the dot products of all vectors of a person with all of a film, and the vectors themselves.
    The MovieLens model compares them so, too."""

    def __init__(self, *, person: int, film: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.top = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(person * film + (person + film) * dim, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, person: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        """Map (B, P, D) and (B, F, D) to (B,), from P and F vectors."""
        dots = torch.bmm(person, film.transpose(1, 2))
        read = torch.cat([dots.flatten(1), person.flatten(1), film.flatten(1)], dim=1)
        logits: torch.Tensor = self.top(read).squeeze(1)
        return logits


class Picks(nn.Module):
    """Scores film i for person u: the probability of a click, (B,) float32. Inputs as `INPUTS` declares them."""

    def __init__(self) -> None:
        super().__init__()
        self.age_band = nn.Embedding(len(AGE_BANDS), DIM)
        self.liked_genres = nn.EmbeddingBag(len(GENRES), DIM, mode="mean", include_last_offset=True)
        self.history = nn.EmbeddingBag(FILMS, DIM, mode="mean", include_last_offset=True)
        self.daypart = nn.Embedding(len(DAYPARTS), DIM)
        self.item = nn.Embedding(FILMS, DIM)
        self.genres = nn.EmbeddingBag(len(GENRES), DIM, mode="mean", include_last_offset=True)
        self.facts = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.match = Match(person=4, film=3, dim=DIM)

    def person(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the person's vectors (B, 4, D) of the user-side inputs."""
        liked = self.liked_genres(given["liked_genres"], given["liked_genres_offsets"])
        seen = self.history(given["history"], given["history_offsets"])
        return torch.stack([self.age_band(given["age_band"]), liked, seen, self.daypart(given["daypart"])], dim=1)

    def film(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the film's vectors (B, 3, D) of the item-side inputs."""
        facts = self.facts(torch.cat([(given["year"] - 2000.0) / 25.0, given["popularity"]], dim=1))
        item = self.item(given["item"])
        return torch.stack([item, self.genres(given["genres"], given["genres_offsets"]), facts], dim=1)

    def forward(self, **given: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the output `score`."""
        return {"score": torch.sigmoid(self.match(self.person(given), self.film(given)))}


def build(folder: Path = FOLDER) -> tuple[Picks, tuple[Input, ...]]:
    """Return the trained model in eval mode, and its inputs. Raises FileNotFoundError if it is not trained yet."""
    model = Picks()
    model.load_state_dict(load_file(folder / STATE))
    return model.eval().requires_grad_(requires_grad=False), INPUTS


def items(folder: Path = FOLDER) -> Mapping[str, torch.Tensor]:
    """Return the item-side inputs of every film by their tensor names: row i of each is film i; `genres_offsets` is (I
    + 1,)."""
    return dict(load_file(folder / ITEMS))


@cache
def item_names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Return the films' names by id."""
    with safe_open(folder / ITEMS, framework="pt") as file:
        return tuple(json.loads(file.metadata()["names"]))
