"""The starter recommender: its films, its people, how it was trained, and what it ranks."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait_disagg.package.read import open_package
from plait_disagg.values import RankRequest
from plait_serving.starter.ranking.picks import FILMS, FOLDER, ITEMS, STATE, build, item_names
from plait_serving.starter.words import GENRES
from starter_training.ranking import __main__ as command
from starter_training.ranking.clicks import make_catalog
from starter_training.ranking.train import PicksAuc, PicksRecipe, auc, judge, train_picks


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=2, max_size=30))
def test_auc_counts_pairs(pairs: list[tuple[bool, int]]):
    """AUC is the share of pairs in which the positive scores higher, ties counted half."""
    positives = [score for label, score in pairs if label]
    negatives = [score for label, score in pairs if not label]
    if not positives or not negatives:
        with pytest.raises(ValueError, match="positives and negatives"):
            auc(*zip(*pairs, strict=True))
        return
    wins = [(good > bad) + (good == bad) / 2 for good, bad in itertools.product(positives, negatives)]
    assert auc(*zip(*pairs, strict=True)) == pytest.approx(sum(wins) / len(wins))


SMALL = PicksRecipe(people=300, people_judged=200, rounds=1)


def test_training_is_reproducible_and_learns(tmp_path: Path):
    """The same recipe writes the same bytes, another seed others; even a little training beats popularity."""
    figures = train_picks(tmp_path / "one", replace(SMALL, people=2000, rounds=4))
    assert figures.auc > figures.auc_of_popularity + 0.03
    states = {}
    for name, recipe in (("a", SMALL), ("b", SMALL), ("c", replace(SMALL, seed=1))):
        train_picks(tmp_path / name, recipe)
        states[name] = (tmp_path / name / STATE).read_bytes(), (tmp_path / name / ITEMS).read_bytes()
    assert states["a"] == states["b"]
    assert states["a"][0] != states["c"][0]


def person(rows: int) -> dict[str, torch.Tensor]:
    """One person's inputs, repeated for every row."""
    genres = torch.tensor([GENRES.index(genre) for genre in ("drama", "crime")])
    seen = torch.tensor([3, 4])
    return {
        "age_band": torch.full((rows,), 2),
        "liked_genres": genres.repeat(rows),
        "liked_genres_offsets": torch.arange(rows + 1) * len(genres),
        "history": seen.repeat(rows),
        "history_offsets": torch.arange(rows + 1) * len(seen),
        "daypart": torch.full((rows,), 2),
    }


def test_the_package_is_the_trained_model():
    """What is served is what was trained: the package's halves score films as the module does."""
    model, _ = build()
    package = open_package(FOLDER / "picks")
    assert package.items is not None
    shown = torch.tensor([5, 1999, 0, 77])
    film = package.items.gather(shown)
    request = RankRequest(request_id="", model="picks", candidates=4, tensors=person(1) | film)
    scores = package.dense().run(package.sparse().run([request]), [4])["score"]
    wanted = model(**person(4), **film)["score"]
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-6)
    assert package.items.names([77]) == [item_names()[77]]


def test_the_shipped_model_comes_near_the_law():
    """On people it never met, the shipped model has at least three quarters of the law's lead over chance."""
    model, _ = build()
    figures = judge(model, make_catalog(FILMS), PicksRecipe(people_judged=1000, seed=77))
    assert figures.auc - 0.5 > 0.75 * (figures.auc_of_the_law - 0.5)
    assert figures.auc > figures.auc_of_popularity + 0.1


def test_picks_are_trained_and_packaged(tmp_path, monkeypatch, capsys):
    """The command writes the state and then the package that is served; its figures are JSON. The manifest of the
    shipped files is only written for those."""
    done = []
    figures = PicksAuc(**dict.fromkeys(PicksAuc.__dataclass_fields__, 0.5))
    monkeypatch.setattr(command, "train_picks", lambda folder: done.append(("train", folder)) or figures)
    monkeypatch.setattr(command, "package_picks", lambda folder: done.append(("package", folder)))
    monkeypatch.setattr(command, "write_manifest", lambda folder: done.append(("manifest", folder)))
    assert command.main(["picks", "--out", str(tmp_path)]) == 0
    assert done == [("train", tmp_path), ("package", tmp_path)]
    assert set(json.loads(capsys.readouterr().out)) == set(PicksAuc.__dataclass_fields__)
