"""The hooks that Serve calls on a ranking worker, and whether a model would answer, without a cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray import serve

from fakes.broadcast import BroadcastHandle
from fakes.ranking import FAKE_CARD
from plait_disagg.workers.ranker import CoreRanker
from plait_kernels.heartbeat import Stuck, ThreadHeartbeat
from plait_serving.deployments.ranking import worker as module
from plait_serving.deployments.ranking.worker import RankWorker, ServeRanker
from plait_serving.ranking.local import LocalRankingService, ServedRanker
from support.prometheus import found


async def test_a_worker_whose_thread_hangs_is_unhealthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Serve replaces it although all of its threads are alive (finding 9). Until then it says what it counts."""
    now_s = [0.0]
    counted = partial(dict, audit_drifted_total=2)
    heartbeat = ThreadHeartbeat(lambda: now_s[0])
    threads = SimpleNamespace(alive=True, heartbeat=heartbeat, addresses=(), metrics=counted, stop=lambda drain_s: None)
    replica = SimpleNamespace(replica_id=SimpleNamespace(to_full_id_str=lambda: "r"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: replica)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(module, "given_knobs", dict)
    monkeypatch.setattr(module, "open_listeners", lambda *_, **__: [])
    monkeypatch.setattr(module, "HnWorker", lambda *_, **__: threads)
    package = SimpleNamespace(folder=tmp_path)
    opened = SimpleNamespace(
        card=lambda mode: FAKE_CARD, dense={"1": None}, version="1", dense_version="1", package=package
    )
    monkeypatch.setattr(module, "open_live", lambda *_, **__: opened)
    worker = RankWorker(name="m", folder=tmp_path, role="hn")

    def check_for(seconds: int) -> None:
        for _ in range(0, seconds, 5):
            now_s[0] += 5
            worker.check_health()

    assert found((await worker.metric_families()).families, "plait_ranker_worker_audit_drifted_total", role="hn") == [2]
    heartbeat.begin("a batch of 3 rows", 0.01)
    check_for(60)
    with pytest.raises(Stuck, match="3 rows"):
        check_for(60)
    heartbeat.rest()
    check_for(600)
    threads.alive = False
    with pytest.raises(RuntimeError, match="the hn's threads have died"):
        worker.check_health()
    await worker.drain(0.0)
    worker.check_health()


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
async def test_one_ready_worker_is_enough(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[object, ...], reason: str | None
) -> None:
    """A CN that lost its HNs is there and cannot answer; another one may."""

    async def connected(_: CoreRanker) -> None:
        return None

    monkeypatch.setattr(CoreRanker, "ready", connected)
    ranker = ServeRanker("picks", BroadcastHandle("why_not_ready", *answers))
    try:
        health = await LocalRankingService({"picks": ServedRanker(ranker=ranker)}).health()
        assert (health.ready, health.reason) == (reason is None, reason)
    finally:
        await ranker.close(drain_s=0)
