"""A ranking model of MovieLens-100k: will this person like this film? Trained here, evaluated on later ratings.

::

    data = read_movielens(wheel)
    model, inputs = fit(data)
    evaluate(data, scorer_of(model))                              AUC of the module itself
    evaluate(data, packaged_scorer(folder, wire="float16"))       AUC of its two halves
    evaluate(data, lambda tensors: ...)                           AUC of whatever else answers requests
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from plait_disagg.graph.inputs import Bag, Dense, Ids, Input
from plait_disagg.package.items import Items
from plait_disagg.package.read import open_package
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.values import RankRequest
from plait_serving.starter.ranking.picks import Match
from starter_training.ranking.movielens_data import AGES, MovieLens, RatingSession, read_movielens
from starter_training.ranking.train import as_bag, auc, descend, tables_of

DIM = 16

_USUAL_SHARE = 0.55
"""The approximate share of ratings that are likes (55.4 % in this data set)."""

Scorer = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Maps a request's tensors (user inputs with one row, item inputs with N) to scores (N,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLensRecipe:
    """The training settings; a batch has `sessions_per_batch` sessions of up to 16 films each."""

    epochs: int = 3
    sessions_per_batch: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.5
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLensAuc:
    """AUC over all later ratings: of the module, of its halves, of those with int8 rows and a float16 wire, and of the
    films' mean rating alone.

    `ratings` is the number of test ratings, `liked` their share of positives, `seconds` the training time.
    """

    auc: float
    auc_cut: float
    auc_cut_int8_rows_float16_wire: float
    auc_of_mean_rating: float
    ratings: int
    liked: float
    seconds: float


class Films(nn.Module):
    """The probability that a person likes a film, (B,) float32. Inputs as `inputs_of` declares them."""

    def __init__(self, *, films: int, genres: int, occupations: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.age_band = nn.Embedding(len(AGES) + 1, DIM)
        self.gender = nn.Embedding(2, DIM)
        self.occupation = nn.Embedding(occupations, DIM)
        self.liked = nn.EmbeddingBag(films, DIM, mode="mean", include_last_offset=True)
        self.disliked = nn.EmbeddingBag(films, DIM, mode="mean", include_last_offset=True)
        self.item = nn.Embedding(films, DIM)
        self.genres = nn.EmbeddingBag(genres, DIM, mode="mean", include_last_offset=True)
        self.facts = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.habit = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.match = Match(person=6, film=3, dim=DIM, dropout=dropout)

    def person(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the person's vectors (B, 6, D) of the user-side inputs."""
        who = [self.age_band(given["age_band"]), self.gender(given["gender"]), self.occupation(given["occupation"])]
        liked = self.liked(given["liked"], given["liked_offsets"])
        disliked = self.disliked(given["disliked"], given["disliked_offsets"])
        return torch.stack([*who, liked, disliked, self.habit(given["habit"])], dim=1)

    def film(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the film's vectors (B, 3, D) of the item-side inputs."""
        item, genres = self.item(given["item"]), self.genres(given["genres"], given["genres_offsets"])
        return torch.stack([item, genres, self.facts(given["facts"])], dim=1)

    def forward(self, **given: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the output `score`."""
        return {"score": torch.sigmoid(self.match(self.person(given), self.film(given)))}


def inputs_of(data: MovieLens) -> tuple[Input, ...]:
    """Return the model's inputs."""
    largest = len(data.names)
    return (
        Ids("age_band", side="user"),
        Ids("gender", side="user"),
        Ids("occupation", side="user"),
        Bag("liked", side="user", largest=largest),
        Bag("disliked", side="user", largest=largest),
        Dense("habit", side="user", shape=(2,)),
        Ids("item", side="item"),
        Bag("genres", side="item", largest=data.genres.shape[1]),
        Dense("facts", side="item", shape=(3,)),
    )


def train_movielens(wheel: Path, out: Path | None = None, recipe: MovieLensRecipe | None = None) -> MovieLensAuc:
    """Read, train, package, evaluate; the package stays in the new folder `out`, ready to be served.

    Raises `BadArchive`, `PackageError` (the folder is taken), OSError.
    """
    data = read_movielens(wheel)
    start = time.perf_counter()
    model, inputs = fit(data, recipe)
    seconds = time.perf_counter() - start
    films = Items(features=item_arrays(data), names=data.names)
    with tempfile.TemporaryDirectory() as scratch:
        exact, small = out or Path(scratch, "exact"), Path(scratch, "small")
        write_package(exact, model, inputs, name="movielens", items=films)
        write_package(small, model, inputs, name="movielens", options=PackageOptions(row_format="int8"))
        auc_cut = evaluate(data, packaged_scorer(exact))
        auc_small = evaluate(data, packaged_scorer(small, wire="float16"))
    labels = np.concatenate([session.liked for session in data.test])
    means = item_arrays(data)["facts"][:, 2].numpy()
    return MovieLensAuc(
        auc=evaluate(data, scorer_of(model)),
        auc_cut=auc_cut,
        auc_cut_int8_rows_float16_wire=auc_small,
        auc_of_mean_rating=auc(labels, np.concatenate([means[session.films] for session in data.test])),
        ratings=labels.size,
        liked=float(labels.mean()),
        seconds=seconds,
    )


def fit(data: MovieLens, recipe: MovieLensRecipe | None = None) -> tuple[Films, tuple[Input, ...]]:
    """Return the trained model in eval mode, and its inputs. Same recipe, same bits (one thread)."""
    recipe = recipe or MovieLensRecipe()
    torch.manual_seed(recipe.seed)
    occupations, genres = int(data.occupation.max()) + 1, data.genres.shape[1]
    model = Films(films=len(data.names), genres=genres, occupations=occupations, dropout=recipe.dropout)
    for table in tables_of(model):
        nn.init.normal_(table, std=0.05)
    films = item_arrays(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    batches = -(-len(data.train) // recipe.sessions_per_batch)
    rng = np.random.default_rng(recipe.seed)

    def losses() -> Iterator[torch.Tensor]:
        for _ in range(recipe.epochs):
            for chosen in np.array_split(rng.permutation(len(data.train)), batches):
                sessions = [data.train[index] for index in chosen]
                labels = torch.from_numpy(np.concatenate([session.liked for session in sessions])).float()
                yield F.binary_cross_entropy_with_logits(_logits(model, data, films, sessions), labels)

    descend(optimizer, recipe.epochs * batches, losses())
    return model.eval().requires_grad_(requires_grad=False), inputs_of(data)


def evaluate(data: MovieLens, scorer: Scorer) -> float:
    """Return the AUC over all test ratings; each session is one request."""
    films = item_arrays(data)
    scores = [scorer(request_tensors(data, films, session)).numpy() for session in data.test]
    return auc(np.concatenate([session.liked for session in data.test]), np.concatenate(scores))


def scorer_of(model: Films) -> Scorer:
    """Return the module itself as a scorer: user inputs are repeated for every candidate, as `forward` expects."""

    def scored(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            vectors = model.person(tensors).expand(len(tensors["item"]), -1, -1)
            return torch.sigmoid(model.match(vectors, model.film(tensors)))

    return scored


def packaged_scorer(folder: Path, *, wire: Literal["float32", "float16"] = "float32") -> Scorer:
    """Return the two halves of a package as a scorer. What crosses the cut is rounded as `wire` would round it."""
    package = open_package(folder)
    sparse, dense = package.sparse(), package.dense()

    def scored(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        candidates = len(tensors["item"])
        request = RankRequest(request_id="", model=package.manifest.name, candidates=candidates, tensors=tensors)
        crossing = dict(sparse.run([request]))
        if wire == "float16":
            crossing |= {name: value.half().float() for name, value in crossing.items() if value.is_floating_point()}
        return dense.run(crossing, [candidates])["score"]

    return scored


def item_arrays(data: MovieLens) -> Mapping[str, torch.Tensor]:
    """Return the item-side inputs of all films, by tensor name. `facts`: year, number and mean of training ratings."""
    genres, offsets = as_bag(np.where(data.genres, np.arange(data.genres.shape[1]), -1))
    films = np.concatenate([session.films for session in data.train])
    liked = np.concatenate([session.liked for session in data.train])
    count = np.bincount(films, minlength=len(data.names))
    # Ten ratings of the average film are added, so that one rating does not make a film the best.
    mean = (np.bincount(films, weights=liked, minlength=len(data.names)) + 10 * liked.mean()) / (count + 10)
    year = np.where(data.year > 0, data.year, 1995)
    facts = np.stack([(year - 1990) / 10, np.log1p(count) / 5, mean], axis=1)
    return {
        "item": torch.arange(len(data.names)),
        "genres": genres,
        "genres_offsets": offsets,
        "facts": torch.from_numpy(facts).float(),
    }


def request_tensors(
    data: MovieLens, films: Mapping[str, torch.Tensor], session: RatingSession
) -> dict[str, torch.Tensor]:
    """Return one session as a request: user inputs with one row, item inputs with a row per film. `films`:
    `item_arrays`."""
    genres, offsets = as_bag(np.where(data.genres[session.films], np.arange(data.genres.shape[1]), -1))
    shown = torch.from_numpy(session.films)
    film = {"item": shown, "genres": genres, "genres_offsets": offsets, "facts": films["facts"][shown]}
    return _person_tensors(data, [session]) | film


def _logits(
    model: Films, data: MovieLens, films: Mapping[str, torch.Tensor], sessions: Sequence[RatingSession]
) -> torch.Tensor:
    """Return (films of all sessions,): the person's vectors once per session, the films' vectors once per film."""
    sizes = torch.tensor([session.films.size for session in sessions])
    person = model.person(_person_tensors(data, sessions)).repeat_interleave(sizes, dim=0)
    shown = torch.from_numpy(np.concatenate([session.films for session in sessions]))
    film = model.film(films).index_select(0, shown)
    logits: torch.Tensor = model.match(person, film)
    return logits


def _person_tensors(data: MovieLens, sessions: Sequence[RatingSession]) -> dict[str, torch.Tensor]:
    """Return user inputs, a row per session. `habit`: share of likes (ten usual ratings added), and the number of
    ratings."""
    people = np.array([session.person for session in sessions])
    liked, liked_offsets = _flat([session.liked_before for session in sessions])
    disliked, disliked_offsets = _flat([session.disliked_before for session in sessions])
    likes, dislikes = liked_offsets.diff(), disliked_offsets.diff()
    share = (likes + 10 * _USUAL_SHARE) / (likes + dislikes + 10)
    return {
        "age_band": torch.from_numpy(data.age_band[people]),
        "gender": torch.from_numpy(data.gender[people]),
        "occupation": torch.from_numpy(data.occupation[people]),
        "liked": liked,
        "liked_offsets": liked_offsets,
        "disliked": disliked,
        "disliked_offsets": disliked_offsets,
        "habit": torch.stack([share, torch.log1p(likes + dislikes) / 5], dim=1).float(),
    }


def _flat(bags: Sequence[NDArray[np.int64]]) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = np.cumsum([0, *(bag.size for bag in bags)])
    return torch.from_numpy(np.concatenate(bags)), torch.from_numpy(offsets)
