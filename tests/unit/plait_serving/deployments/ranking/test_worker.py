"""The hooks that Serve calls on a ranking worker, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait_fabric.heartbeat import Stuck, ThreadHeartbeat
from plait_serving.deployments.ranking.worker import RankWorker


class Clock:
    """A clock that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def worker_with(heartbeat: ThreadHeartbeat) -> Any:
    """A worker whose threads live; its constructor would need Ray."""
    worker: Any = object.__new__(RankWorker)
    worker._role = "cn"
    worker._stopped = False
    worker._worker = SimpleNamespace(alive=True, stop=lambda drain_s: None)
    worker._core = SimpleNamespace(heartbeat=heartbeat)
    worker._refresher = None
    return worker


def test_a_worker_whose_thread_hangs_is_unhealthy() -> None:
    """Serve replaces it although all of its threads are alive (finding 9)."""
    clock = Clock()
    heartbeat = ThreadHeartbeat(clock)
    worker = worker_with(heartbeat)
    heartbeat.begin("a batch of 3 rows", 0.01)

    def check_for(seconds: int) -> None:
        for _ in range(0, seconds, 5):
            clock.now_s += 5
            worker.check_health()

    check_for(60)
    with pytest.raises(Stuck, match="3 rows"):
        check_for(60)
    heartbeat.rest()
    check_for(600)
    worker._worker.alive = False
    with pytest.raises(RuntimeError, match="the cn's threads have died"):
        worker.check_health()
