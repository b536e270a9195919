"""What Serve's proxy answers itself has the API's form."""

from __future__ import annotations

import json
import logging
import re

import httpx2
import pytest
import uvicorn.config
from ray.serve._private import proxy as ray_proxy
from ray.serve._private.http_util import _apply_middlewares
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from plait_serving.deployments.ingress import without_request_id
from plait_serving.deployments.proxy import AnsweringMiddleware, configure_proxy
from support.app_server import AppServer
from support.http_app import make_app
from support.waiting import wait_for


def asked(app, path="/v1/images/generations", **headers):
    return TestClient(AnsweringMiddleware(app)).post(path, content=b"{}", headers=headers)


async def silent(scope, receive, send):
    """The ingress died: Serve logs why, and says nothing."""


async def broken(scope, receive, send):
    raise RuntimeError("no proxy should")


@pytest.mark.parametrize(
    "app", [silent, broken, PlainTextResponse("Request 1 failed", 503), PlainTextResponse("", 404)]
)
def test_a_request_without_an_answer_of_ours_gets_one(app):
    """It names the request, and says when to ask again."""
    answer = asked(app, **{"x-request-id": "mine"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "request_lost"
    assert answer.headers["content-type"] == "application/json"
    assert (answer.headers["retry-after"], answer.headers["x-request-id"]) == ("1", "mine")
    assert set(asked(app, "/v2/models/picks/infer").json()) == {"error"}


@pytest.mark.parametrize(
    ("app", "path"),
    [
        (JSONResponse({"error": {"code": "overloaded"}}, 429), "/v1/rank"),
        (PlainTextResponse("plait_requests_total 1"), "/metrics"),
        (PlainTextResponse("starting", 503), "/-/healthz"),
        (PlainTextResponse(": step 1/20\n\n", media_type="text/event-stream"), "/v1/images/generations"),
    ],
)
def test_other_answers_stay_as_they_are(app, path):
    """Those of the ingress, a stream of events that has ended, and those that Serve's own health checks are to
    read."""
    answer = asked(app, path)
    assert (answer.status_code, answer.content) == (app.status_code, app.body)


def test_an_answer_that_breaks_off_stays_broken():
    """Its client must not take a part for the whole."""

    async def breaks(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        asked(breaks)


@pytest.mark.parametrize("error", [None, RuntimeError("in the middle")])
def test_a_stream_of_events_that_breaks_off_ends_with_an_error(error):
    """The ingress was killed, as at the end of a rolling upgrade's patience: whoever reads the stream is told."""

    async def breaks(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b": step 1/20\n\n", "more_body": True})
        if error is not None:
            raise error

    progress, last, end = asked(breaks).text.split("\n\n")
    assert (progress, end) == (": step 1/20", "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_lost"


@pytest.fixture
def behind_the_proxy(monkeypatch):
    """An application behind all that Serve's proxy puts before it, and the ids that it saw."""
    monkeypatch.setattr(ray_proxy, "MessageQueue", ray_proxy.MessageQueue)
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    seen, servers = [], []

    def make(app):
        async def ingress(scope, receive, send):
            if scope["type"] == "http":
                seen.extend(value.decode() for name, value in scope["headers"] if name == b"x-request-id")
            await app(scope, receive, send)

        servers.append(AppServer(_apply_middlewares(ingress, configure_proxy())))
        return servers[-1].port, seen

    yield make
    for server in servers:
        server.stop()


@pytest.mark.parametrize("given", [["mine"], ["a b"], ["mine", "other"]])
@pytest.mark.parametrize("answers", [True, False])
def test_one_id_is_answered_passed_on_and_logged(behind_the_proxy, caplog, given, answers):
    """The client's, or one in place of a malformed one: alike for the proxy, Serve, and the ingress, also where it
    died."""
    port, seen = behind_the_proxy(without_request_id(make_app(FakeImageService())) if answers else silent)
    with caplog.at_level(logging.INFO, logger="plait.http.access"):
        sent = [("content-type", b"application/json"), *(("x-request-id", each.encode("latin-1")) for each in given)]
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            answer = client.post("/v1/images/generations", content=b'{"prompt": "x"}', headers=sent)
        told = answer.json()

        def lines():
            return [record.getMessage() for record in caplog.records if record.name == "plait.http.access"]

        wait_for(lambda: lines() or not answers)  # the line comes after the answer
    (only,) = seen
    assert answer.headers.get_list("x-request-id") == [only]
    assert only == "mine" if given[:1] == ["mine"] else re.fullmatch(r"req_[0-9a-f]{24}", only)
    if answers:
        assert told["id"] == only
        (line,) = lines()
        assert line.endswith(f" {only}")
