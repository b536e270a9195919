"""The Open Inference Protocol over a fake ranker: what is answered, and in which form what is wrong is said."""

from __future__ import annotations

import gzip
import json
import threading
import time

import numpy as np
import pytest
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from fakes.ranking import FAKE_CARD, FakeRanker, fake_rankers
from plait_serving.health import Health
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.http.ranking import infer
from plait_serving.ranking.local import LocalRankingService
from support.http_rank import HEADER, INFER, arrays, as_binary, as_json, make_client, outputs_of
from support.prometheus import total


@pytest.fixture
def client():
    return make_client()


def test_the_model_lists_every_tensor(client):
    """A bag is two tensors; the user's have one row, the items' -1; outputs are FP32."""
    about = client.get("/v2/models/picks").json()
    assert client.get("/v2/models/picks/versions/1").json() == about
    shapes = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in about["inputs"]}
    assert shapes == {
        "person": ("INT64", [1]),
        "mood": ("FP32", [1, 3]),
        "history": ("INT64", [-1]),
        "history_offsets": ("INT64", [2]),
        "item": ("INT64", [-1]),
        "price": ("FP32", [-1, 1]),
        "genres": ("INT64", [-1]),
        "genres_offsets": ("INT64", [-1]),
    }
    outputs = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in about["outputs"]}
    assert outputs == {"score": ("FP32", [-1]), "parts": ("FP32", [-1, 2])}


@pytest.mark.parametrize("candidates", [None, 1000])
@pytest.mark.parametrize("items", [False, True])
def test_the_example_can_be_posted_as_it_is(candidates, items):
    """It is answered, has as many candidates as asked for, and is the same each time. They are items of the store,
    where there is one: scores of a first try then mean something."""
    client = make_client(items=items)
    url = "/v2/models/picks/example" + ("" if candidates is None else f"?candidates={candidates}")
    example = client.get(url)
    assert example.content == client.get(url).content
    tensors = {tensor["name"]: tensor["data"] for tensor in example.json()["inputs"]}
    assert (tensors["price"] == [i / 8 for i in tensors["item"]]) == items
    answer = client.post(INFER, content=example.content)
    assert outputs_of(answer)["score"].shape == (candidates or 64,)


@pytest.mark.parametrize("candidates", ["0", "1001", "x", "9" * 30])
def test_an_example_has_bounds(client, candidates):
    """No more candidates than the model takes, and never so many that making them costs something."""
    answer = client.get(f"/v2/models/picks/example?candidates={candidates}")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("candidates: ")


def test_no_content_type_is_needed_and_none_is_believed(client):
    """tritonclient sends none; curl -d sends that of a form."""
    body = json.dumps(as_json(arrays()))
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/plain"}):
        assert client.post(INFER, content=body, headers=headers).status_code == 200


def test_outputs_come_in_the_form_and_the_order_that_is_asked_for(client):
    """A subset, each as JSON or binary; binary_data_output decides for those that do not say."""
    asked = [{"name": "parts"}, {"name": "score", "parameters": {"binary_data": False}}]
    body = as_json(arrays(), outputs=asked, parameters={"binary_data_output": True})
    answer = client.post(INFER, json=body)
    assert answer.headers["content-type"] == "application/octet-stream"
    head = json.loads(answer.content[: int(answer.headers[HEADER])])
    assert [tensor["name"] for tensor in head["outputs"]] == ["parts", "score"]
    assert ["data" in tensor for tensor in head["outputs"]] == [False, True]
    plain = outputs_of(client.post(INFER, json=as_json(arrays())))
    for name, values in outputs_of(answer).items():
        np.testing.assert_array_equal(values, plain[name])


def test_id_and_parameters_are_echoed(client):
    """All but those that were for the transport."""
    parameters = {"deadline_ms": 5000, "trace": "x", "flag": True, "binary_data_output": False}
    head = client.post(INFER, json=as_json(arrays(), id="", parameters=parameters)).json()
    assert head["id"] == ""
    assert head["parameters"] == {"deadline_ms": 5000, "trace": "x", "flag": True}
    assert "id" not in client.post(INFER, json=as_json(arrays())).json()


def test_a_bomb_does_not_go_off():
    """A small body that unpacks to more than the limit is a 413, and never made whole."""
    client = make_client(settings=HttpSettings(max_body_bytes=1 << 20))
    bomb = gzip.compress(b" " * (16 << 20))
    assert len(bomb) < 1 << 20
    answer = client.post(INFER, content=bomb, headers={"content-encoding": "gzip"})
    assert (answer.status_code, "when it is unpacked" in answer.json()["error"]) == (413, True)


def test_unpacked_bodies_count_among_those_that_are_held():
    """Compression is no way around the bound of all bodies together."""
    raw = json.dumps(as_json(arrays())).encode() + b" " * 10_000
    settings = HttpSettings(max_bodies_bytes=len(raw))
    answer = make_client(settings=settings).post(
        INFER, content=gzip.compress(raw), headers={"content-encoding": "gzip"}
    )
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    client = make_client(settings=HttpSettings(max_bodies_bytes=len(raw) * 3))
    for _ in range(3):  # what one request held is free again for the next
        answer = client.post(INFER, content=gzip.compress(raw), headers={"content-encoding": "gzip"})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (b"nope", "gzip"),
        (gzip.compress(b"{}", mtime=0)[:-3], "gzip"),
        (gzip.compress(b"{}", mtime=0) + b"x", "gzip"),
        (b"{}", "br"),
    ],
)
def test_a_body_that_can_not_be_unpacked_is_a_400(client, content, encoding):
    """Garbage, cut off, followed by something, or of another encoding."""
    answer = client.post(INFER, content=content, headers={"content-encoding": encoding})
    assert answer.status_code == 400
    assert answer.json()["error"]


# --- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/models/nope/infer", 404),
        ("GET", "/v2/models/picks/versions/2", 404),
        ("GET", "/v2/nope", 404),
        ("GET", INFER, 405),
    ],
)
def test_errors_have_the_protocols_form(client, method, path, status):
    """{"error": "a sentence"}, wherever below /v2 they come from."""
    answer = client.request(method, path)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert isinstance(answer.json()["error"], str)


def changed(**changes):
    return as_json(arrays() | changes)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (as_json(arrays(), outputs=[{"name": "scores"}]), "scores: the model has no such output; did you mean score?"),
        (changed(item=np.array([0, 1, 99])), "item"),
        (changed(genres_offsets=np.array([0, 2, 1, 3])), "genres_offsets"),
        (changed(history=np.zeros(10_001, np.int64), history_offsets=np.array([0, 10_001])), "history"),
    ],
)
def test_bad_values_are_a_400_that_names_the_input(client, body, names):
    """An output that there is not, ids outside their table, offsets that do not add up, a bag that is too long."""
    answer = client.post(INFER, json=body)
    assert answer.status_code == 400
    assert names in answer.json()["error"]


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_numbers_must_be_finite(client, bad):
    """NaN and infinity are refused in binary, where JSON cannot even say them; and 1e300 does not fit FP32."""
    sent = arrays() | {"price": np.array([[0], [1], [bad]], np.float32)}
    body, headers = as_binary(sent)
    answer = client.post(INFER, content=body, headers=headers)
    assert (answer.status_code, "price" in answer.json()["error"]) == (400, True)
    answer = client.post(INFER, json=as_json(arrays() | {"price": np.array([[0], [1], [1e300]])}))
    assert (answer.status_code, "price" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("header", ["x", "-1", "", "9" * 40, "9" * 11, "0"])
def test_a_bad_header_length_is_a_400(client, header):
    """The message names the header."""
    body, _ = as_binary(arrays())
    answer = client.post(INFER, content=body, headers={HEADER: header})
    assert (answer.status_code, HEADER in answer.json()["error"]) == (400, True)


def test_json_that_is_too_long_is_a_413_and_says_what_to_do():
    """Parsing holds the whole process, so only binary tensors may be large."""
    client = make_client(settings=HttpSettings(max_infer_json_bytes=1000))
    answer = client.post(INFER, json=as_json(arrays(100)))
    assert (answer.status_code, "binary" in answer.json()["error"]) == (413, True)
    body, headers = as_binary(arrays(100))
    assert len(body) > 2000
    client = make_client(settings=HttpSettings(max_infer_json_bytes=2000))
    assert client.post(INFER, content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_body_is_read_beside_the_event_loop(monkeypatch, is_long):
    """Others are answered meanwhile."""
    threads, parse = [], infer.parse_infer

    def watched(*args, **more):
        threads.append(threading.current_thread().name)
        return parse(*args, **more)

    monkeypatch.setattr(infer, "parse_infer", watched)
    body = json.dumps(as_json(arrays())) + " " * (300_000 * is_long)
    assert make_client().post(INFER, content=body).status_code == 200
    assert threads[0].startswith("plait-work_") == is_long


@pytest.mark.parametrize("parameters", [{"deadline_ms": 300}, {"timeout": 300_000}])
def test_a_deadline_that_passes_is_a_504(parameters):
    """At the deadline (ours in ms, Triton's in microseconds), and the work on it ends: rankers keep deadlines, as
    `test_workers_ranker` holds all of them to, also while a worker is stuck."""
    ranker = FakeRanker(work_s=60.0)
    answer = make_client(ranker).post(INFER, json=as_json(arrays(), parameters=parameters))
    assert answer.status_code == 504
    assert len(ranker.cancelled) == 1


def test_the_ranker_is_told_the_deadline():
    """As a moment of the monotonic clock; none without one."""
    ranker = FakeRanker()
    client = make_client(ranker)
    client.post(INFER, json=as_json(arrays()))
    before_s = time.monotonic()
    client.post(INFER, json=as_json(arrays(), parameters={"deadline_ms": 50_000}))
    client.post(INFER, json=as_json(arrays(), parameters={"timeout": 0}))
    without, given, triton = [request.deadline_s for request in ranker.ranked]
    assert (without, triton) == (None, None)
    assert before_s + 50 <= given <= time.monotonic() + 50


@pytest.mark.parametrize("value", [0, "5", True, 1e300])
def test_a_senseless_deadline_is_a_400(client, value):
    """Named as the parameter that it is."""
    answer = client.post(INFER, json=as_json(arrays(), parameters={"deadline_ms": value}))
    assert (answer.status_code, "parameters.deadline_ms" in answer.json()["error"]) == (400, True)


# --- beside the image API ----------------------------------------------------------------------------------------


def test_a_server_may_have_both():
    """Each model is listed as what it is; the rankers are ready before the image model is."""
    images = FakeImageService(health=Health(ready=False, reason="no warm-up picture yet"))
    client = TestClient(create_app(images, HttpSettings(), ranking=LocalRankingService(fake_rankers())))
    assert client.get("/health").json()["reason"] == "no warm-up picture yet"
    assert client.get("/v2/models/picks/ready").json() == {"name": "picks", "ready": True}
    listed = [(model["id"], model["kind"]) for model in client.get("/v1/models").json()["data"]]
    assert listed == [("emoji", "base"), ("picks", "recommender")]
    assert client.get("/v1/models/picks").json()["items"] == FAKE_CARD.items


def test_a_server_has_only_the_routes_of_what_it_has():
    """No image routes without an image model, no ranking routes without a recommender."""
    ranks = make_client()
    assert ranks.get("/").status_code == 200  # the page, which understands that
    assert ranks.get("/v1/status").json()["services"] == {"ranking": True}
    assert ranks.post("/v1/images/generations", json={"prompt": "x"}).status_code == 404
    draws = TestClient(create_app(FakeImageService(), HttpSettings()))
    assert draws.get("/v2").status_code == 404
    assert draws.post("/v1/recommend", json={}).status_code == 404
    assert not any(path.startswith("/v2") for path in draws.get("/openapi.json").json()["paths"])


def test_metrics_count_rankings():
    """By model: how many, where the time went, candidates, bytes; and what the ranker itself counts."""
    client = make_client()
    for candidates in (3, 5):
        client.post(INFER, json=as_json(arrays(candidates)))
    client.post(INFER, json={})
    got = client.get("/metrics").text
    assert total(got, "plait_rank_stage_seconds_sum", model="picks", stage="dense") == pytest.approx(0.004)
    assert total(got, "plait_rank_candidates_total", model="picks") == 8
    assert total(got, "plait_rank_crossed_bytes_total", model="picks") == 64 * 8
    route = "/v2/models/{model}/infer"
    assert total(got, "plait_requests_total", route=route, outcome="ok") == 2
    assert total(got, "plait_requests_total", route=route, outcome="bad_request") == 1
    assert total(got, "plait_rank_request_duration_seconds_count", route=route) == 3
    assert total(got, "plait_ranker_requests_total", model="picks") == 2


def test_a_model_answers_under_the_name_that_it_is_served_by():
    """A configuration may call a package anything; no answer shows the name it was packaged under."""
    models = {"films": fake_rankers()["picks"]}
    client = TestClient(create_app(None, HttpSettings(), ranking=LocalRankingService(models)))
    for path in ("films", "films/ready"):
        assert client.get(f"/v2/models/{path}").json()["name"] == "films"
    assert client.post("/v2/models/films/infer", json=as_json(arrays())).json()["model_name"] == "films"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["films"]
    user = {"person": 3, "mood": [0.5, 1, -0.25], "history": []}
    assert client.post("/v1/recommend", json={"user": user, "candidates": [1]}).json()["model"] == "films"
    assert total(client.get("/metrics").text, "plait_rank_candidates_total", model="films") == 4
    assert client.get("/v2/models/picks").status_code == 404
