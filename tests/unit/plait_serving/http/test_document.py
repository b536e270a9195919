"""The OpenAPI document: every way in which a request can end is in it, in the form that it has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from fakes.ranking import FakeRanker, fake_rankers
from plait_disagg.errors import Busy, DeadlinePassed, RankError, WorkerUnavailable
from plait_disagg.values import ModelCard
from plait_serving.diffusion.errors import Cancelled
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.http.edge.errors import ANSWERS
from plait_serving.ranking.local import LocalRankingService, ServedRanker
from plait_serving.starter.preprocess import PREPROCESSORS

KEYLESS = ("/health", "/version", "/v2/health/live", "/v2/health/ready", "/v1/images/results/{name}")
IMAGES, RECOMMEND = "/v1/images/generations", "/v1/recommend"
INFER = "/v2/models/{model}/infer"


def app_with(images: FakeImageService | None = None, ranker: FakeRanker | None = None) -> TestClient:
    """A server of both."""
    ranking = LocalRankingService(fake_rankers(ranker))
    app = create_app(images or FakeImageService(), HttpSettings(), ranking=ranking)
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found = app_with().get("/openapi.json").json()
    assert isinstance(found, dict)
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def test_every_operation_can_end_as_the_middlewares_end_it(document: dict[str, Any]) -> None:
    """Sizes, keys, hosts and failures know no routes; the probes of load balancers need no key."""
    for path, method, operation in operations(document):
        found = set(operation["responses"])
        assert {"403", "413", "414", "429", "500"} <= found, (method, path)
        assert ("401" in found) == (path not in KEYLESS)
        assert all(code.isdigit() for code in found), (method, path)


def test_errors_have_the_form_of_their_part_of_the_api(document: dict[str, Any]) -> None:
    """OpenAI's, and below /v2 the protocol's; who is to come back is told when."""
    for path, method, operation in operations(document):
        form = "ErrorMessage" if path.startswith("/v2") else "ErrorBody"
        for code, answer in operation["responses"].items():
            if int(code) >= 400 and answer["content"]["application/json"]["schema"].get("$ref"):
                assert answer["content"]["application/json"]["schema"]["$ref"].endswith(form), (method, path, code)
                assert ("retry-after" in answer["headers"]) == (code in ("429", "503")), (method, path, code)
            assert "x-request-id" in answer["headers"]
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()


def test_a_stream_and_metrics_are_what_they_are(document: dict[str, Any]) -> None:
    """Content types of what is no JSON."""
    answer = document["paths"][IMAGES]["post"]["responses"]["200"]
    assert set(answer["content"]) == {"application/json", "text/event-stream"}
    assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    infer = document["paths"][INFER]["post"]
    assert infer["requestBody"]["content"]["application/json"]["schema"]["required"] == ["inputs"]
    assert infer["responses"]["200"]["content"]["application/json"]["schema"]["required"] == ["outputs"]


def test_generators_of_typed_clients_understand_it(document: dict[str, Any]) -> None:
    """They take an answer's first content, and what is in a path is always there. openapi-python-client's code for a
    body of several kinds wants something that may be left out beside it. Texts name no files of ours."""
    for path, method, operation in operations(document):
        for code, answer in operation["responses"].items():
            kinds = list(answer.get("content", {}))
            assert "application/json" not in kinds[1:], (method, path, code)
        for parameter in operation.get("parameters", ()):
            assert parameter["in"] != "path" or parameter["schema"]["type"] == "string", (method, path)
        if "requestBody" in operation:
            assert not all(parameter["required"] for parameter in operation["parameters"]), (method, path)
        in_path = {it["name"] for it in operation.get("parameters", ()) if it["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path))
    assert re.findall(r"[\w/]+\.(?:py|md|js|yaml)\b", json.dumps(document)) == []


def test_each_first_body_is_answered(document: dict[str, Any]) -> None:
    """Every POST with a body has one in the document, to be sent as it is: interactive documentation shows it."""
    settings = HttpSettings(preprocessors=PREPROCESSORS)
    app = create_app(FakeImageService(), settings, ranking=LocalRankingService(fake_rankers()))
    client = TestClient(app, raise_server_exceptions=False)
    asked = 0
    for path, method, operation in operations(document):
        if method != "post" or "requestBody" not in operation:
            continue
        body = operation["requestBody"]["content"]["application/json"]["example"]
        names = {it["name"]: it["example"] for it in operation["parameters"] if it["in"] == "path"}
        answer = client.post(path.format(**names), json=body)
        if path.endswith("/load"):  # of a folder that is somewhere else
            assert answer.json() == {"error": "model 'picks' cannot be refreshed"}
        else:
            assert answer.status_code == 200, (path, answer.text)
        asked += 1
    assert asked == 7


class StartingRanker(FakeRanker):
    """Whose worker is not there at first."""

    is_starting = True

    @property
    def card(self) -> ModelCard:
        """Raises as long as there is none."""
        if self.is_starting:
            raise WorkerUnavailable("x")
        return super().card


def test_a_model_that_still_starts_has_no_first_body_yet() -> None:
    """It is asked again for the next document, and only then that one is kept."""
    ranker = StartingRanker()
    ranking = LocalRankingService({"picks": ServedRanker(ranker=ranker, items=None)})
    client = TestClient(create_app(FakeImageService(), HttpSettings(), ranking=ranking))

    def first_body() -> Any:
        bodies = client.get("/openapi.json").json()["paths"][RECOMMEND]["post"]["requestBody"]["content"]
        return bodies["application/json"].get("example")

    assert first_body() is None
    ranker.is_starting = False
    body = first_body()
    assert client.post(RECOMMEND, json=body).status_code == 200
    assert isinstance(body["candidates"], list)  # of a model without a list of its items


def test_the_document_is_built_once() -> None:
    """And not from what an earlier application made of the shared parts."""
    first, second = app_with(), app_with()
    assert first.get("/openapi.json").json() == first.get("/openapi.json").json() == second.get("/openapi.json").json()


def test_whatever_the_engine_raises_is_documented(document: dict[str, Any]) -> None:
    """With its retry-after where one is promised."""
    for error in (*(kind("x") for kind, *_ in ANSWERS if kind is not Cancelled), ValueError("x")):
        answer = app_with(FakeImageService(failures={"fails": error})).post(IMAGES, json={"prompt": "fails"})
        described = document["paths"][IMAGES]["post"]["responses"][str(answer.status_code)]
        assert ("retry-after" in answer.headers) == ("retry-after" in described["headers"]), error


RAISED = (Busy("x"), DeadlinePassed("x"), WorkerUnavailable("x"), RankError("x"), ValueError("secret"))


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_whatever_a_ranker_raises_is_documented(document: dict[str, Any], error: Exception) -> None:
    """On both of its routes; an unexpected one does not tell its message."""
    ranker = FakeRanker()
    ranker.error = error
    client = app_with(ranker=ranker)
    body = client.get("/v2/models/picks/example").json()
    user = {"person": 1, "mood": [0, 0, 0], "history": []}
    for path, sent in ((INFER, body), (RECOMMEND, {"user": user, "candidates": "all"})):
        answer = client.post(path.format(model="picks"), json=sent)
        assert answer.status_code >= 429
        assert "secret" not in answer.text
        described = document["paths"][path]["post"]["responses"][str(answer.status_code)]
        assert ("retry-after" in answer.headers) == ("retry-after" in described["headers"])
