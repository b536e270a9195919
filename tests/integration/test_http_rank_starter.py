"""The starter recommender behind the whole HTTP side: one process, real halves and people's words."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from plait_disagg.package.read import open_package
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.whole import WholeCore
from plait_kernels.executors import background
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.config import STARTER_RANKING_FOLDER, STARTER_RANKING_MODEL
from plait_serving.ranking.local import LocalRankingService, ServedRanker
from support.dense import programs_win
from support.http_rank import as_json, outputs_of

INFER = f"/v2/models/{STARTER_RANKING_MODEL}/infer"
USER = {"age_band": 3, "liked_genres": [11, 7], "history": [5, 900], "daypart": 2}


@contextmanager
def served(package, dense):
    """An application with that dense half."""
    ranker = CoreRanker(WholeCore(package.card(), package.sparse(), dense))
    yield create_app(
        None,
        HttpSettings(),
        ranking=LocalRankingService({STARTER_RANKING_MODEL: ServedRanker(ranker=ranker, items=package.items)}),
    )
    asyncio.run(ranker.close(drain_s=1.0))


@pytest.fixture(scope="module")
def client():
    package = open_package(STARTER_RANKING_FOLDER)
    with served(package, package.dense()) as app:
        yield TestClient(app, raise_server_exceptions=False)


def test_recurring_rankings_run_on_openvino():
    """All of its operators are proven."""
    pytest.importorskip("openvino", reason="needs openvino")
    package = open_package(STARTER_RANKING_FOLDER)
    dense = package.dense(prepares=True)
    with served(package, dense) as made, programs_win():
        client = TestClient(made, raise_server_exceptions=False)
        example = client.get(f"/v2/models/{STARTER_RANKING_MODEL}/example?candidates=64")
        for _ in range(5):
            assert client.post(INFER, content=example.content).status_code == 200
            background.wait()
        assert "plait_ranker_audit_checked_total" in client.get("/metrics").text
    assert dense.programs.batches


def test_people_and_tensors_get_the_same_scores(client):
    """/v1/recommend by ids and infer with the items' tensors are the same question."""
    ids = [1686, 4, 700]
    body = {"user": USER, "candidates": ids}
    ranked = {item["id"]: item["score"] for item in client.post("/v1/recommend", json=body).json()["items"]}
    items = open_package(STARTER_RANKING_FOLDER).items
    tensors = {name: tensor.numpy() for name, tensor in items.gather(torch.tensor(ids)).items()}
    for name, value in USER.items():
        tensors[name] = np.atleast_1d(np.array(value, np.int64))
        if isinstance(value, list):
            tensors[f"{name}_lengths"] = np.array([len(value)])
    scores = outputs_of(client.post(INFER, json=as_json(tensors)))["score"]
    assert scores.tolist() == pytest.approx([ranked[i] for i in ids], rel=1e-5)
