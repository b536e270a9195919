"""Train `picks` on generated clicks and report how close it comes to the law that made them.

A batch is about a hundred people with the films that they were shown, so the person's vectors are computed once per
person and repeated, like in the server.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors.torch import save_file
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

from plait_disagg.package.items import Items
from plait_disagg.package.write import PackageOptions, write_package
from plait_serving.starter.ranking.picks import FILMS, FOLDER, ITEMS, STATE, Picks, build, item_names, items
from starter_training.ranking.clicks import Clicks, FilmCatalog, make_catalog, make_clicks

REPORT = "picks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PicksRecipe:
    """The training settings: `rounds` over `people` new people each, so that none is seen twice and nothing is
    memorized.

    `people_per_batch` people bring everything that they were shown.
    """

    people: int = 24_000
    people_judged: int = 4_000
    rounds: int = 30
    people_per_batch: int = 128
    learning_rate: float = 3e-3
    table_learning_rate: float = 1e-2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PicksAuc:
    """AUC over all pairs of people who were not trained on: of the model, of the planted law, of popularity alone.

    `clicked` is the share of positives; `seconds` the training time.
    """

    auc: float
    auc_of_the_law: float
    auc_of_popularity: float
    clicked: float
    seconds: float


def train_picks(folder: Path = FOLDER, recipe: PicksRecipe | None = None) -> PicksAuc:
    """Train, evaluate, and write the state, films and a report into `folder`. Same recipe, same bits (one thread)."""
    recipe = recipe or PicksRecipe()
    catalog = make_catalog(FILMS)
    start = time.perf_counter()
    model = train(catalog, recipe)
    seconds = time.perf_counter() - start
    figures = judge(model, catalog, recipe, seconds)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / STATE)
    save_file(dict(item_arrays(catalog)), folder / ITEMS, metadata={"names": json.dumps(catalog.names)})
    report = {"recipe": asdict(recipe), "figures": {name: round(value, 4) for name, value in asdict(figures).items()}}
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return figures


def package_picks(folder: Path = FOLDER) -> None:
    """Package what `train_picks` wrote into `folder / "picks"`, replacing what is there."""
    model, inputs = build(folder)
    target = folder / "picks"
    shutil.rmtree(target, ignore_errors=True)
    films = Items(features=items(folder), names=item_names(folder))
    # What a request usually holds, which the cut is made for.
    usual = {"liked_genres": 3, "history": 20, "genres": 2}
    options = PackageOptions(largest_candidates=FILMS, ids_per_bag=usual)
    write_package(target, model, inputs, name="picks", items=films, options=options)


def train(catalog: FilmCatalog, recipe: PicksRecipe) -> Picks:
    """Return the trained model, in eval mode. The learning rate falls to zero along half a cosine."""
    torch.manual_seed(recipe.seed)
    model = Picks()
    tables = tables_of(model)
    for table in tables:
        nn.init.normal_(table, std=0.3)
    groups: list[dict[str, Any]] = [
        {"params": tables, "lr": recipe.table_learning_rate},
        {"params": [*model.facts.parameters(), *model.match.parameters()]},
    ]
    optimizer = torch.optim.Adam(groups, lr=recipe.learning_rate)
    steps = recipe.rounds * -(-recipe.people // recipe.people_per_batch)
    films = item_arrays(catalog)

    def losses() -> Iterator[torch.Tensor]:
        for number in range(recipe.rounds):
            clicks = make_clicks(catalog, recipe.people, seed=_seed(recipe, number))
            for people in np.array_split(np.arange(recipe.people), steps // recipe.rounds):
                labels = torch.from_numpy(clicks.label[people].reshape(-1)).float()
                yield F.binary_cross_entropy_with_logits(_logits(model, films, clicks, people), labels)

    descend(optimizer, steps, losses())
    return model.eval()


def tables_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the embedding tables of a model."""
    return [one.weight for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]


def descend(optimizer: torch.optim.Optimizer, steps: int, losses: Iterable[torch.Tensor]) -> None:
    """Take a step by each loss, which is computed when its turn comes. The learning rate falls to zero along half a
    cosine."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


def judge(model: Picks, catalog: FilmCatalog, recipe: PicksRecipe, seconds: float = 0.0) -> PicksAuc:
    """Return the figures over people of another seed."""
    clicks = make_clicks(catalog, recipe.people_judged, seed=_seed(recipe, -1))
    return PicksAuc(
        auc=auc(clicks.label, score(model, catalog, clicks)),
        auc_of_the_law=auc(clicks.label, clicks.law),
        auc_of_popularity=auc(clicks.label, catalog.popularity[clicks.item]),
        clicked=float(clicks.label.mean()),
        seconds=seconds,
    )


def score(model: Picks, catalog: FilmCatalog, clicks: Clicks) -> NDArray[np.float32]:
    """Return the logits (U, N) of everything that was shown."""
    films = item_arrays(catalog)
    with torch.inference_mode():
        parts = [
            _logits(model, films, clicks, people)
            for people in np.array_split(np.arange(len(clicks)), len(clicks) // 500 + 1)
        ]
    scores: NDArray[np.float32] = torch.cat(parts).numpy().reshape(clicks.item.shape)
    return scores


def item_arrays(catalog: FilmCatalog) -> Mapping[str, torch.Tensor]:
    """Return the item-side inputs of all films, by tensor name."""
    genres, offsets = as_bag(np.where(catalog.genres, np.arange(catalog.genres.shape[1]), -1))
    return {
        "item": torch.arange(len(catalog)),
        "genres": genres,
        "genres_offsets": offsets,
        "year": torch.from_numpy(catalog.year).float().unsqueeze(1),
        "popularity": torch.from_numpy(catalog.popularity).float().unsqueeze(1),
    }


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Return the probability that a positive scores above a negative, ties counted half. Raises ValueError if one of
    the two is missing."""
    is_positive = np.asarray(labels, dtype=bool).ravel()
    if is_positive.all() or not is_positive.any():
        raise ValueError("AUC needs positives and negatives")
    return float(roc_auc_score(is_positive, np.asarray(scores).ravel()))


def as_bag(padded: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of ids, with -1 where there is none, as flat ids and offsets (rows + 1,)."""
    there = padded >= 0
    offsets = np.zeros(len(padded) + 1, dtype=np.int64)
    np.cumsum(there.sum(1), out=offsets[1:])
    return torch.from_numpy(padded[there]), torch.from_numpy(offsets)


def _seed(recipe: PicksRecipe, number: int) -> int:
    """Return the seed of the people of a round; -1: of the test people."""
    return 1000 * recipe.seed + 1 + number


def _logits(model: Picks, films: Mapping[str, torch.Tensor], clicks: Clicks, people: NDArray[np.int64]) -> torch.Tensor:
    """Return (people * N,): each person with the films that they were shown."""
    shown = torch.from_numpy(clicks.item[people].reshape(-1))
    liked, history = as_bag(clicks.liked_genres[people]), as_bag(clicks.history[people])
    user = {
        "age_band": torch.from_numpy(clicks.age_band[people]),
        "liked_genres": liked[0],
        "liked_genres_offsets": liked[1],
        "history": history[0],
        "history_offsets": history[1],
        "daypart": torch.from_numpy(clicks.daypart[people]),
    }
    # The films' vectors once each, then by id: there are fewer films than rows in a batch.
    film = model.film(films).index_select(0, shown)
    logits: torch.Tensor = model.match(model.person(user).repeat_interleave(clicks.item.shape[1], dim=0), film)
    return logits
