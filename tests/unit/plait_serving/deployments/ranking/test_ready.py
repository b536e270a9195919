"""Whether a split model would answer: what its CNs say, beside whether they are there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from plait_disagg.workers.ranker import CoreRanker
from plait_serving.deployments.ranking.worker import ServeRanker
from plait_serving.ranking.local import LocalRankingService, ServedRanker


class Handle:
    """Serve's, of workers that say these things."""

    def __init__(self, *answers: object) -> None:
        self.answers = answers
        self.options = lambda **_: self

    def broadcast(self, method: str, *_: object) -> SimpleNamespace:
        said = self.answers if method == "why_not_ready" else ()
        return SimpleNamespace(results=lambda **_: list(said))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((None,), None),
        (("no HN answers", None), None),
        (("no HN answers", TimeoutError()), "model picks: no HN answers"),
        ((TimeoutError(),), "model picks: no worker answered within 1.5 s"),
        ((), "model picks: no worker answered within 1.5 s"),
    ],
)
async def test_one_ready_worker_is_enough(monkeypatch, answers, reason):
    """A CN that lost its HNs is there and cannot answer; another one may."""

    async def connected(_: CoreRanker) -> None:
        return None

    monkeypatch.setattr(CoreRanker, "ready", connected)
    ranker = ServeRanker("picks", Handle(*answers))
    try:
        health = await LocalRankingService({"picks": ServedRanker(ranker=ranker)}).health()
        assert (health.ready, health.reason) == (reason is None, reason)
    finally:
        await ranker.close(drain_s=0)
