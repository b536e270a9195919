"""Reading MovieLens-100k out of a wheel, and training on it: here on a small data set of the same form."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from plait_disagg.package.manifest import PackageError
from plait_disagg.package.read import open_package
from starter_training.ranking.__main__ import main
from starter_training.ranking.movielens import (
    MovieLensRecipe,
    evaluate,
    fit,
    item_arrays,
    scorer_of,
    train_movielens,
)
from starter_training.ranking.movielens_data import BadArchive, read_movielens

PEOPLE, FILMS, RATINGS = 12, 20, 900
FOLDER = "recbole/dataset_example/ml-100k/ml-100k"


def tables() -> dict[str, str]:
    """A data set in recbole's form: people like films whose number is as even or odd as theirs."""
    draw = random.Random(0)
    user = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    user += [f"{100 + one}\t{20 + 3 * one}\t{'FM'[one % 2]}\tjob{one % 3}\t00000" for one in range(PEOPLE)]
    item = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    item += [f"{200 + one}\tFilm {one}, The\t{1980 + one if one else 'unknown'}\tg{one % 2} g2" for one in range(FILMS)]
    inter = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for moment in range(RATINGS):
        person, film = draw.randrange(PEOPLE), draw.randrange(FILMS)
        rating = 5 if (person + film) % 2 == 0 else 2
        inter.append(f"{100 + person}\t{200 + film}\t{rating}\t{moment}")
    return {"user": "\n".join(user), "item": "\n".join(item), "inter": "\n".join(inter[:1] + inter[:0:-1])}


def write_wheel(path: Path, files: Mapping[str, str]) -> Path:
    """A wheel with these tables."""
    with zipfile.ZipFile(path, "w") as archive:
        for kind, text in files.items():
            archive.writestr(f"{FOLDER}.{kind}", text)
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A good one."""
    return write_wheel(tmp_path / "recbole.whl", tables())


def test_the_split_is_by_time(wheel: Path):
    """Training sees the first 80 % of all ratings, whatever the order in the file; every rating is in one session."""
    data = read_movielens(wheel)
    assert sum(session.films.size for session in data.train) == RATINGS * 8 // 10
    assert sum(session.films.size for session in data.test) == RATINGS * 2 // 10
    assert max(session.films.size for session in data.train) <= 16
    assert data.names[3] == "The Film 3 (1983)"
    assert data.names[0] == "The Film 0"
    assert data.year[0] == 0


def test_histories_never_look_ahead(wheel: Path):
    """A session's history is exactly what the person rated before it, and its labels are ratings of 4 or 5."""
    data = read_movielens(wheel)
    before: dict[int, list[int]] = {}
    for session in (*data.train, *data.test):
        history = np.concatenate([session.liked_before, session.disliked_before])
        assert sorted(history.tolist()) == sorted(before.get(session.person, []))
        before.setdefault(session.person, []).extend(session.films.tolist())
        assert np.array_equal(session.liked, (session.person + session.films) % 2 == 0)


def test_facts_come_from_training_alone(wheel: Path):
    """How well a film is rated is counted over the training ratings: later ones would leak the answer."""
    data = read_movielens(wheel)
    count = np.expm1(item_arrays(data)["facts"][:, 1].numpy() * 5)
    assert round(float(count.sum())) == RATINGS * 8 // 10


def test_the_model_learns(wheel: Path):
    """On people whose law is simple it ranks later ratings well, and training again gives the same bits."""
    data = read_movielens(wheel)
    recipe = MovieLensRecipe(epochs=40, learning_rate=1e-2, dropout=0.1)
    model, inputs = fit(data, recipe)
    assert [one.name for one in inputs][:3] == ["age_band", "gender", "occupation"]
    assert evaluate(data, scorer_of(model)) > 0.9
    one, again = (fit(data, replace(recipe, epochs=2))[0].parameters() for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one, again, strict=True))


@pytest.mark.parametrize("fault", ["no zip", "no tables", "a number is a word", "a person is missing", "empty"])
def test_what_is_not_the_wheel_is_refused(fault: str, wheel: Path, capsys: pytest.CaptureFixture[str]):
    """A file that is not the wheel is refused by name, and the command says so and fails."""
    files = tables()
    if fault == "no zip":
        wheel.write_bytes(b"hello")
    elif fault == "no tables":
        write_wheel(wheel, {"user": files["user"]})
    elif fault == "a number is a word":
        write_wheel(wheel, files | {"user": files["user"].replace("\t20\t", "\tyoung\t")})
    elif fault == "a person is missing":
        write_wheel(wheel, files | {"user": "\n".join(files["user"].splitlines()[:-1])})
    else:
        write_wheel(wheel, dict.fromkeys(files, ""))
    with pytest.raises(BadArchive, match=str(wheel)):
        read_movielens(wheel)
    assert main(["movielens", str(wheel)]) == 1
    assert "not a recbole wheel" in capsys.readouterr().err


def test_the_cut_keeps_the_figures(wheel: Path, tmp_path: Path):
    """AUC is reported whole, cut, and with int8 rows and a float16 wire, nearly the same; the package can be opened."""
    figures = train_movielens(wheel, tmp_path / "package", MovieLensRecipe(epochs=5, learning_rate=1e-2))
    assert figures.ratings == RATINGS * 2 // 10
    assert figures.auc_cut == pytest.approx(figures.auc, abs=1e-4)
    assert figures.auc_cut_int8_rows_float16_wire == pytest.approx(figures.auc, abs=0.01)
    package = open_package(tmp_path / "package")
    assert package.items is not None
    assert package.items.names([3]) == ["The Film 3 (1983)"]
    with pytest.raises(PackageError, match="exists already"):
        train_movielens(wheel, tmp_path / "package", MovieLensRecipe(epochs=1))
