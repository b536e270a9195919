"""What clients are told of workers that cannot be reached: that, and not where they would be."""

from __future__ import annotations

import asyncio
import logging

import fastapi.applications
import pytest
from starlette.testclient import TestClient

from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.remote import RemoteCore
from plait_fabric.rpc.outages import Backoff
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService, ServedRanker
from support.waiting import wait_for

WHERE = "default_picks#0a1b2c at shm:///tmp/plait-1000/rank-4711-0a1b2c3d: nobody listens"


def nobody(left_out: frozenset[str]) -> ReplicaLink:
    """A `Connect` that finds a dead socket."""
    raise NoReplica(WHERE)


def test_errors_name_no_socket_and_no_replica(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 12: a 503 told whoever asked the paths of sockets, `/health` even without a key. The log has them. And
    paths that are none do not have the schema made each time, as long as it lacks the models' examples."""
    made: list[object] = []
    make = fastapi.applications.get_openapi
    monkeypatch.setattr(fastapi.applications, "get_openapi", lambda **facts: made.append(1) or make(**facts))
    with caplog.at_level(logging.WARNING, logger="plait_fabric"):
        ranker = CoreRanker(RemoteCore("picks", nobody, backoff=Backoff(first_s=0.01, max_s=0.01)))
        wait_for(lambda: WHERE in caplog.text)
        app = create_app(None, HttpSettings(), ranking=LocalRankingService({"picks": ServedRanker(ranker=ranker)}))
        client = TestClient(app, raise_server_exceptions=False)
        asked = [client.get(path) for path in ("/health", "/v2/health/ready", "/v2/models/picks")]
        asked.append(client.post("/v2/models/picks/infer", json={"inputs": []}))
        asked.append(client.post("/v1/recommend", json={"user": {}, "candidates": []}))
        unknown = [client.get(path) for path in ("/v2/model", "/v2/nothing", "/v1/modles")]
        wait_for(lambda: ranker.core.ready() is not None)
        asyncio.run(ranker.close(drain_s=0))
    assert [answer.status_code for answer in unknown] == [404] * 3
    assert "did you mean /v1/models?" in unknown[2].text
    assert len(made) == 1
    for answer in asked:
        assert answer.status_code == 503
        assert "picks" in answer.text
        assert not any(word in answer.text for word in ("shm:", "tmp", "4711", "0a1b2c", "#"))
    lines = [record for record in caplog.records if WHERE in record.getMessage()]
    assert len(lines) == 1  # not one for each of many attempts
