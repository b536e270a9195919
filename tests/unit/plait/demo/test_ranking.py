"""Whether the demo ranks; `tests/e2e/test_wheel.py` has it do so."""

from __future__ import annotations

import pytest

from plait.demo import ranking as demo_ranking


@pytest.mark.parametrize(("listed", "offered"), [(["emoji"], False), (["emoji", "picks"], True)])
def test_the_demo_ranks_only_where_the_starter_is(monkeypatch, listed, offered):
    """A server without the recommender is no fault."""
    import httpx2

    class Answer:
        @staticmethod
        def json():
            return {"data": [{"id": name} for name in listed]}

    monkeypatch.setattr(httpx2, "get", lambda url, timeout: Answer)
    assert demo_ranking.offers_ranking("http://127.0.0.1:1") is offered
