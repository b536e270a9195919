"""POST /v1/recommend: people's words in, the best items first out, and a hint for whatever is wrong."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from fakes.ranking import FakeItems, FakeRanker, fake_outputs
from plait_disagg.errors import BadInput
from plait_disagg.graph.inputs import Bag, Dense, Ids
from plait_disagg.values import ModelCard, RankAnswer
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.http.ranking import recommend
from plait_serving.http.ranking.recommend import arrays_of, item_ids, ranking
from plait_serving.ranking.inputs import Binder
from plait_serving.ranking.local import LocalRankingService, ServedRanker
from support.http_rank import make_client

URL = "/v1/recommend"
USER = {"person": 3, "mood": [0.5, 1, -0.25], "history": [4, 4, 19]}


def ask(client, **changes):
    body = {"user": USER, "candidates": [5, 1, 9]} | changes
    return client.post(URL, json={name: value for name, value in body.items() if value is not ...})


def test_the_best_items_come_first_with_names_and_scores():
    """What the ranker says of the items' own features, sorted; with the time it took."""
    ranker = FakeRanker()
    answer = ask(make_client(ranker))
    assert answer.status_code == 200
    body = answer.json()
    (request,) = ranker.ranked
    scores = dict(zip([5, 1, 9], fake_outputs(request)["score"].tolist(), strict=True))
    best = sorted(scores, key=scores.__getitem__, reverse=True)
    assert body["items"] == [{"id": i, "score": scores[i], "name": f"item number {i}"} for i in best]
    assert body["model"] == "picks"
    assert body["timings"]["dense_ms"] == 2.0
    assert set(body["timings"]) == {"queued_ms", "lookup_ms", "wire_ms", "dense_ms", "total_ms"}


def test_the_ranker_gets_the_users_and_the_items_tensors():
    """A number, a list, a bag; and what the store knows of each item."""
    ranker = FakeRanker()
    ask(make_client(ranker))
    tensors = ranker.ranked[0].tensors
    assert tensors["person"].tolist() == [3]
    assert tensors["mood"].tolist() == [[0.5, 1.0, -0.25]]
    assert (tensors["history"].tolist(), tensors["history_offsets"].tolist()) == ([4, 4, 19], [0, 3])
    for name, expected in FakeItems().gather(torch.tensor([5, 1, 9])).items():
        assert torch.equal(tensors[name], expected)


def test_candidates_may_be_described_instead_of_named():
    """The same features give the same scores; the answer then holds places, not ids."""
    client = make_client()
    named = {item["id"]: item["score"] for item in ask(client).json()["items"]}
    objects = [{"item": i, "price": i / 8, "genres": list(range(i % 4))} for i in (5, 1, 9)]
    described = ask(make_client(items=False), candidates=objects).json()["items"]
    assert {(5, 1, 9)[item["index"]]: item["score"] for item in described} == named
    assert all(set(item) == {"index", "score"} for item in described)


def test_all_items_can_be_ranked_and_the_best_few_kept():
    """candidates: "all" and top_k."""
    client = make_client()
    everything = ask(client, candidates="all").json()["items"]
    assert sorted(item["id"] for item in everything) == list(range(20))
    assert ask(client, candidates="all", top_k=4).json()["items"] == everything[:4]
    assert ask(client, candidates="all", top_k=400).json()["items"] == everything


def test_one_id_of_a_bag_may_stand_alone_and_a_bag_may_be_empty():
    """history: 4 is history: [4]."""
    ranker = FakeRanker()
    client = make_client(ranker)
    for history in (4, [4], []):
        assert ask(client, user=USER | {"history": history}).status_code == 200
    first, second, third = [request.tensors["history"].tolist() for request in ranker.ranked]
    assert first == second == [4]
    assert third == []


def test_an_input_may_be_called_like_a_bags_lengths():
    """The row has both, and neither is taken for the other."""
    inputs = (Bag("a", "user"), Dense("a_lengths", "user"))
    tensors = Binder(inputs).bind(arrays_of(inputs, [{"a": [1, 2], "a_lengths": 0.5}], "user"))
    assert (tensors["a"].tolist(), tensors["a_offsets"].tolist()) == ([1, 2], [0, 2])
    assert tensors["a_lengths"].tolist() == [[0.5]]


def test_equal_scores_stay_in_the_candidates_order_and_nan_is_last():
    """A stable sort; a NaN is no reason to fail, and never the best."""
    scores = np.array([1, 3, np.nan, 3, 2, 3], np.float32)
    assert ranking(scores, None) == [1, 3, 5, 4, 0, 2]
    assert ranking(scores, 2) == [1, 3]


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"candidates": ...}, "candidates", "must be given"),
        ({"users": {}}, "users", "did you mean user"),
        ({"user": {}}, "user.person", "misses person, mood, history"),
        ({"user": USER | {"mod": 1}}, "user.mod", "did you mean mood"),
        ({"user": USER | {"person": 3.5}}, "user.person", "whole numbers"),
        ({"user": USER | {"person": 50}}, "user.person", "outside 0..49"),
        ({"user": USER | {"mood": 1}}, "user.mood", "list of shape [3]"),
        ({"candidates": "al"}, "candidates", '"all"'),
        ({"candidates": [1] * 1001}, "candidates", "1 to 1000"),
        ({"candidates": [0, 20]}, "candidates[1]", "ids are 0 to 19"),
        ({"candidates": [0, True]}, "candidates[1]", "no item True"),
        ({"candidates": [{"item": 1, "pric": 1, "genres": []}]}, "candidates[0].pric", "did you mean price"),
        ({"candidates": [{"item": 1, "price": "1", "genres": []}]}, "candidates.price", "numbers"),
        ({"candidates": [{"item": 1, "price": 1, "genres": [1] * 9}]}, "candidates.genres_offsets", "at most 8"),
        ({"top_k": 0}, "top_k", "1"),
        ({"deadline_ms": 0}, "deadline_ms", "greater"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_a_hint(changes, param, says):
    """A 400 in the form of the rest of /v1."""
    ranker = FakeRanker()
    answer = ask(make_client(ranker), **changes)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says.lower() in error["message"].lower()
    assert set(error) == {"message", "type", "param", "code"}
    assert ranker.ranked == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_must_be_finite(number):
    """Python's JSON reads what JSON is not; it goes no further."""
    body = f'{{"user": {{"person": 1, "mood": [{number}, 0, 0], "history": []}}, "candidates": [1]}}'
    answer = make_client().post(URL, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "user.mood")


def test_without_a_store_ids_mean_nothing():
    """The answer says what to send instead."""
    client = make_client(items=False)
    for candidates in ([1, 2], "all"):
        error = ask(client, candidates=candidates).json()["error"]
        assert error["param"] == "candidates"
        assert "send objects with item, price, genres" in error["message"]


def test_items_without_names_have_none():
    """A store may know features only."""
    models = {"picks": ServedRanker(ranker=FakeRanker(), items=FakeItems(named=False))}
    client = TestClient(create_app(None, HttpSettings(), ranking=LocalRankingService(models)))
    assert all(set(item) == {"id", "score"} for item in ask(client).json()["items"])


class Column:
    """Another model: one feature of each side, and scores as a column whose middle one is NaN."""

    card = ModelCard(
        name="column", version="3", inputs=(Dense("age", side="user"), Ids("thing")), outputs={"p": (1,)}, items=None
    )

    async def rank(self, request):
        return RankAnswer(outputs={"p": torch.tensor([[1.0], [float("nan")], [2.0]])[: request.candidates]})

    async def ready(self):
        return None

    def metrics(self):
        return {}


def test_with_several_models_one_must_be_named():
    """The message lists them; an unknown one is a 404 with the code that OpenAI's client knows."""
    models = {"picks": ServedRanker(ranker=FakeRanker()), "column": ServedRanker(ranker=Column())}
    client = TestClient(create_app(None, HttpSettings(), ranking=LocalRankingService(models)))
    error = ask(client).json()["error"]
    assert (error["param"], "picks, column" in error["message"]) == ("model", True)
    answer = ask(client, model="nope")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = ask(client, model="column", user={"age": 7}, candidates=[{"thing": i} for i in (1, 2, 3)])
    assert answer.json()["items"] == [
        {"index": 2, "score": 2.0},
        {"index": 0, "score": 1.0},
        {"index": 1, "score": None},
    ]


@pytest.mark.parametrize(
    ("changes", "is_long"),
    [({}, False), ({"candidates": [1] * 1_000}, False), ({"user": {**USER, "history": [1] * 10_000}}, True),
     ({"candidates": [{"item": 1, "price": 1, "genres": [1] * 10_000}]}, True)],
)  # fmt: skip
def test_a_long_body_is_read_beside_the_event_loop(monkeypatch, changes, is_long):
    """However few its candidates are: a list of the user may be as long."""
    threads = []
    arrays_of = recommend.arrays_of

    def watched(*args):
        threads.append(threading.current_thread().name)
        return arrays_of(*args)

    monkeypatch.setattr(recommend, "arrays_of", watched)
    assert ask(make_client(), **changes).status_code in (200, 400)
    (name,) = set(threads)
    assert name.startswith("plait-work_") == is_long


def test_a_deadline_is_a_504_that_names_its_field():
    """In the form of the rest of /v1."""
    answer = ask(make_client(FakeRanker(work_s=60.0)), deadline_ms=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (504, "deadline_ms")


def test_a_wrong_id_is_not_written_out():
    """It may be a list of all that a body may hold; its message has the beginning."""
    shown = []

    class Item:
        def __repr__(self):
            shown.append(self)
            return "item"

    with pytest.raises(BadInput, match=r"there is no item \[item, item") as refused:
        item_ids([[Item() for _ in range(1_000)]], 20)
    assert len(shown) < 10
    assert len(refused.value.message) < 200
    with pytest.raises(BadInput, match=f"no item {'a' * 40};"):
        item_ids(["a" * 1_000], 20)
