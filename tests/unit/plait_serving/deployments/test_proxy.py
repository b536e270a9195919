"""What Serve's proxy answers itself has the API's form."""

from __future__ import annotations

import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.testclient import TestClient

from plait_serving.deployments.proxy import AnsweringMiddleware


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
    ],
)
def test_other_answers_stay_as_they_are(app, path):
    """Those of the ingress, and those that Serve's own health checks are to read."""
    answer = asked(app, path)
    assert (answer.status_code, answer.content) == (app.status_code, app.body)


def test_an_answer_that_breaks_off_stays_broken():
    """Its client must not take a part for the whole."""

    async def breaks(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        asked(breaks)
