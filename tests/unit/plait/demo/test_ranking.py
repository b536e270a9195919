"""The demo's ranking half: bodies that the starter model takes, and what is said of the answers."""

from __future__ import annotations

import pytest

from plait.demo import ranking as demo_ranking
from plait_serving.http.ranking.recommend import RecommendBody, arrays_of
from plait_serving.ranking.inputs import Binder
from plait_serving.starter.ranking.picks import INPUTS

TIMINGS = {"queued_ms": 0.1, "lookup_ms": 0.25, "wire_ms": 0.0, "dense_ms": 1.5, "total_ms": 2.0}


class Asked:
    """Answers with the same films each time; keeps the bodies."""

    def __init__(self):
        self.bodies = []

    def __call__(self, body):
        self.bodies.append(body)
        items = [{"id": i, "score": 1 - i / 10, "name": f"Film {i}"} for i in range(body["top_k"])]
        return {"items": items, "timings": TIMINGS}


def test_the_demo_ranks_for_people_of_different_tastes():
    """Each body is valid, and binds to the starter's user-side inputs; each of them hears five names with scores, and
    the time it took."""
    ask, said = Asked(), []
    demo_ranking.rank_for_everybody(ask, say=said.append)
    user_side = [item for item in INPUTS if item.side == "user"]
    for body in ask.bodies:
        parsed = RecommendBody.model_validate(body)
        tensors = Binder(user_side).bind(arrays_of(user_side, [parsed.user], "user"))
        assert tensors["liked_genres"].tolist() == body["user"]["liked_genres"]
    for person in demo_ranking.PEOPLE:
        (place,) = [i for i, line in enumerate(said) if person.who in line]
        assert "dense 1.5" in said[place]
        assert " ms (in the server 2.0" in said[place]
        assert [line.split() for line in said[place + 1 : place + 6]] == [
            [f"{1 - i / 10:.3f}", "Film", str(i)] for i in range(5)
        ]


@pytest.mark.parametrize(("listed", "offered"), [(["emoji"], False), (["emoji", "picks"], True)])
def test_the_demo_ranks_only_where_the_starter_is(monkeypatch, listed, offered):
    """A server without the recommender is no fault."""
    import httpx2

    class Answer:
        @staticmethod
        def json():
            return {"data": [{"id": name} for name in listed]}

    monkeypatch.setattr(httpx2, "get", lambda url, timeout, trust_env: Answer)
    assert demo_ranking.offers_ranking("http://127.0.0.1:1") is offered
