"""MovieLens-100k from the recbole wheel: ratings in time order, people, films.

The data is GroupLens's (https://grouplens.org/datasets/movielens/100k/: research use, no redistribution), so it is
read where the user has put it and never stored. A rating of 4 or 5 of 5 counts as liked.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

AGES = (18, 25, 35, 45, 50, 56)
"""The lower bounds of the age bands, as in MovieLens-1M; below the first is a separate band."""

_FOLDER = "recbole/dataset_example/ml-100k/ml-100k"
_MAX_MEMBER_BYTES = 16 << 20
_LIKED = 4.0
_SESSION = 16
"""The max films in a session. People rated dozens at a sitting; their earlier ratings are known for the later ones."""


class BadArchive(Exception):
    """The file is not the recbole wheel, or not one with MovieLens-100k inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingSession:
    """Up to 16 films that one person rated one after the other: one request.

    `liked_before` and `disliked_before` are what they had rated until then. Numbers are rows of `MovieLens`.
    """

    person: int
    liked_before: NDArray[np.int64]
    disliked_before: NDArray[np.int64]
    films: NDArray[np.int64]
    liked: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLens:
    """The data set with a split by time.

    By person: `age_band`, `gender`, `occupation` (U,) int64. By film: `names`, `genres` (I, G) bool, `year` (I,)
    int64 (0: unknown).
    """

    age_band: NDArray[np.int64]
    gender: NDArray[np.int64]
    occupation: NDArray[np.int64]
    names: tuple[str, ...]
    genres: NDArray[np.bool_]
    year: NDArray[np.int64]
    train: tuple[RatingSession, ...]
    test: tuple[RatingSession, ...]


@dataclass(frozen=True, slots=True)
class _Ratings:
    """Ratings sorted by time, then in file order."""

    person: NDArray[np.int64]
    film: NDArray[np.int64]
    liked: NDArray[np.bool_]


def read_movielens(wheel: Path, *, train_share: float = 0.8) -> MovieLens:
    """Read the data set; the first `train_share` of all ratings in time are for training, the others for testing.

    Raises `BadArchive`, OSError.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            people, films, ratings = (_table(archive, kind) for kind in ("user", "item", "inter"))
        person_of = {row["user_id"]: index for index, row in enumerate(people)}
        film_of = {row["item_id"]: index for index, row in enumerate(films)}
        order = sorted(ratings, key=lambda row: float(row["timestamp"]))
        rated = _Ratings(
            np.array([person_of[row["user_id"]] for row in order]),
            np.array([film_of[row["item_id"]] for row in order]),
            np.array([float(row["rating"]) >= _LIKED for row in order]),
        )
        train, test = _sessions(rated, int(len(order) * train_share))
        return MovieLens(
            age_band=np.searchsorted(AGES, [int(row["age"]) for row in people], side="right"),
            gender=_numbers([row["gender"] for row in people]),
            occupation=_numbers([row["occupation"] for row in people]),
            names=tuple(_name(row) for row in films),
            genres=_genres([row["class"] for row in films]),
            year=np.array([int(row["release_year"]) if row["release_year"].isdigit() else 0 for row in films]),
            train=train,
            test=test,
        )
    except (zipfile.BadZipFile, LookupError, ValueError) as error:
        raise BadArchive(f"{wheel}: not a recbole wheel with MovieLens-100k inside: {error!r}") from error


def _table(archive: zipfile.ZipFile, kind: str) -> list[dict[str, str]]:
    """Return the rows of one of the data set's files: tab-separated, columns named `name:type`."""
    member = f"{_FOLDER}.{kind}"
    if archive.getinfo(member).file_size > _MAX_MEMBER_BYTES:
        raise ValueError(f"{member} is larger than MovieLens-100k")
    lines = archive.read(member).decode().splitlines()
    columns = [column.split(":")[0] for column in lines[0].split("\t")]
    return [dict(zip(columns, line.split("\t"), strict=True)) for line in lines[1:]]


def _sessions(rated: _Ratings, trained: int) -> tuple[tuple[RatingSession, ...], tuple[RatingSession, ...]]:
    """Return the first `trained` ratings as sessions, and the others, which have the first as history."""
    liked: dict[int, list[int]] = {}
    disliked: dict[int, list[int]] = {}
    parts = []
    for start, stop in ((0, trained), (trained, rated.person.size)):
        part = []
        for rows in _runs(rated.person, start, stop):
            person = int(rated.person[rows[0]])
            session = RatingSession(
                person=person,
                liked_before=np.array(liked.get(person, []), dtype=np.int64),
                disliked_before=np.array(disliked.get(person, []), dtype=np.int64),
                films=rated.film[rows],
                liked=rated.liked[rows],
            )
            part.append(session)
            liked.setdefault(person, []).extend(session.films[session.liked].tolist())
            disliked.setdefault(person, []).extend(session.films[~session.liked].tolist())
        parts.append(tuple(part))
    return parts[0], parts[1]


def _runs(person: NDArray[np.int64], start: int, stop: int) -> Iterator[list[int]]:
    """Yield ratings `start : stop` in runs of at most 16 of one person, each person's in time order."""
    open_runs: dict[int, list[int]] = {}
    for row in range(start, stop):
        run = open_runs.setdefault(int(person[row]), [])
        run.append(row)
        if len(run) == _SESSION:
            yield open_runs.pop(int(person[row]))
    yield from open_runs.values()


def _numbers(words: list[str]) -> NDArray[np.int64]:
    """Return each word's index among the sorted distinct ones."""
    place = {word: index for index, word in enumerate(sorted(set(words)))}
    return np.array([place[word] for word in words])


def _genres(classes: list[str]) -> NDArray[np.bool_]:
    known = sorted({genre for one in classes for genre in one.split()})
    return np.array([[genre in one.split() for genre in known] for one in classes])


def _name(row: dict[str, str]) -> str:
    title = re.sub(r"^(.*), (The|A|An)$", r"\2 \1", row["movie_title"].strip())
    return f"{title} ({row['release_year']})" if row["release_year"].isdigit() else title
