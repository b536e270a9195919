"""MovieLens-100k from the recbole wheel: ratings in time order, people, films.

The data is GroupLens's (https://grouplens.org/datasets/movielens/100k/: research use, no redistribution), so it is
read where the user has put it and never stored. A rating of 4 or 5 of 5 counts as liked.
"""

from __future__ import annotations

import re
import zipfile
from collections import defaultdict
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
        person = np.array([person_of[row["user_id"]] for row in order])
        film = np.array([film_of[row["item_id"]] for row in order])
        liked = np.array([float(row["rating"]) >= _LIKED for row in order])
        train, test = _sessions(person, film, liked, int(len(order) * train_share))
        return MovieLens(
            age_band=np.searchsorted(AGES, [int(row["age"]) for row in people], side="right"),
            gender=np.unique([row["gender"] for row in people], return_inverse=True)[1],
            occupation=np.unique([row["occupation"] for row in people], return_inverse=True)[1],
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


def _sessions(
    person: NDArray[np.int64], film: NDArray[np.int64], is_liked: NDArray[np.bool_], trained: int
) -> tuple[tuple[RatingSession, ...], ...]:
    """Return the first `trained` ratings as sessions, and the others, which have the first as history."""
    liked, disliked = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    parts: list[list[RatingSession]] = []
    for start, stop in ((0, trained), (trained, person.size)):
        parts.append([])
        for rows in _runs(person, start, stop):
            who = int(person[rows[0]])
            session = RatingSession(
                person=who,
                liked_before=np.array(liked[who], dtype=np.int64),
                disliked_before=np.array(disliked[who], dtype=np.int64),
                films=film[rows],
                liked=is_liked[rows],
            )
            parts[-1].append(session)
            liked[who] += session.films[session.liked].tolist()
            disliked[who] += session.films[~session.liked].tolist()
    return tuple(map(tuple, parts))


def _runs(person: NDArray[np.int64], start: int, stop: int) -> Iterator[list[int]]:
    """Yield ratings `start : stop` in runs of at most 16 of one person, each person's in time order."""
    open_runs: dict[int, list[int]] = {}
    for row in range(start, stop):
        run = open_runs.setdefault(int(person[row]), [])
        run.append(row)
        if len(run) == _SESSION:
            yield open_runs.pop(int(person[row]))
    yield from open_runs.values()


def _genres(classes: list[str]) -> NDArray[np.bool_]:
    known = sorted({genre for one in classes for genre in one.split()})
    return np.array([[genre in one.split() for genre in known] for one in classes])


def _name(row: dict[str, str]) -> str:
    title = re.sub(r"^(.*), (The|A|An)$", r"\2 \1", row["movie_title"].strip())
    return f"{title} ({row['release_year']})" if row["release_year"].isdigit() else title
