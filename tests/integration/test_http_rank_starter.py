"""The starter recommender behind the whole HTTP side: one process, real halves, tritonclient and people's words."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from plait_disagg.package.read import open_package
from plait_disagg.workers.whole import WholeRanker
from plait_kernels.executors import background
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.config import STARTER_RANKING_FOLDER, STARTER_RANKING_MODEL
from plait_serving.ranking.local import LocalRankingService
from plait_serving.ranking.service import ServedRanker
from support.app_server import AppServer
from support.dense import programs_win
from support.http_rank import as_json, outputs_of

INFER = f"/v2/models/{STARTER_RANKING_MODEL}/infer"
USER = {"age_band": 3, "liked_genres": [11, 7], "history": [5, 900], "daypart": 2}


@contextmanager
def served(package, dense):
    """An application with that dense half."""
    ranker = WholeRanker(package.card(), package.sparse(), dense)
    yield create_app(
        None,
        HttpSettings(),
        ranking=LocalRankingService({STARTER_RANKING_MODEL: ServedRanker(ranker=ranker, items=package.items)}),
    )
    asyncio.run(ranker.close(drain_s=1.0))


@pytest.fixture(scope="module")
def app():
    package = open_package(STARTER_RANKING_FOLDER)
    with served(package, package.dense()) as made:
        yield made


@pytest.fixture(scope="module")
def client(app):
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("candidates", [1, 64, 512])
def test_the_example_is_answered(client, candidates):
    """As it is, with scores that are probabilities."""
    example = client.get(f"/v2/models/{STARTER_RANKING_MODEL}/example?candidates={candidates}")
    answer = client.post(INFER, content=example.content)
    assert answer.status_code == 200, answer.text
    scores = outputs_of(answer)["score"]
    assert scores.shape == (candidates,)
    assert ((scores > 0) & (scores < 1)).all()


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


def test_different_tastes_get_different_films(client):
    """What the demo shows."""
    best = []
    for liked in ([11, 7], [8, 9]):
        body = {"user": USER | {"liked_genres": liked, "history": []}, "candidates": "all", "top_k": 20}
        best.append({item["id"] for item in client.post("/v1/recommend", json=body).json()["items"]})
    assert len(best[0] & best[1]) < 10


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"history": [2000]}, "user.history"),
        ({"daypart": -1}, "user.daypart"),
        ({"liked_genres": [12]}, "user.liked_genres"),
    ],
)
def test_ids_outside_their_tables_are_refused_by_name(client, changes, param):
    """400, and the next request is answered."""
    answer = client.post("/v1/recommend", json={"user": USER | changes, "candidates": [1]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert client.post("/v1/recommend", json={"user": USER, "candidates": [1]}).status_code == 200


def test_tritonclient_ranks_with_the_starter_at_once_from_many_threads(app, client):
    """Binary, unchanged client, several connections: every answer is its own request's."""
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    server = AppServer(app)

    def ask(candidates):
        example = client.get(f"/v2/models/{STARTER_RANKING_MODEL}/example?candidates={candidates}").json()
        expected = outputs_of(client.post(INFER, content=json.dumps(example)))["score"]
        inputs = []
        for tensor in example["inputs"]:
            dtype = np.float32 if tensor["datatype"] == "FP32" else np.int64
            inputs.append(triton.InferInput(tensor["name"], tensor["shape"], tensor["datatype"]))
            inputs[-1].set_data_from_numpy(np.array(tensor["data"], dtype).reshape(tensor["shape"]))
        with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as connected:
            got = connected.infer(STARTER_RANKING_MODEL, inputs).as_numpy("score")
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        return got.shape

    try:
        with ThreadPoolExecutor(4) as threads:
            sizes = [1, 2, 3, 64, 5, 6, 7, 100]
            assert list(threads.map(ask, sizes)) == [(size,) for size in sizes]
    finally:
        server.stop()
