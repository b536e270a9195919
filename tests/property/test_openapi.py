"""The OpenAPI document against the application: whatever it allows or forbids is answered as it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.images import FakeImageService
from fakes.ranking import fake_rankers
from fakes.tuning_desk import LocalTuningService, Threads, desk_in
from plait.tuning.service.http import tuning_router
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService

MIN_CALLS = 300
CALLS = 12
"""For each operation and mode; what takes no parameters has fewer different requests."""

KNOWN = {"model": "picks", "model_id": "emoji", "version": "1"}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The document of a server that has everything, around fakes."""
    import schemathesis  # here, because it takes seconds, which whoever collects the tests need not wait

    desk = desk_in(tmp_path_factory.mktemp("openapi") / "jobs", Threads())
    ranking = LocalRankingService(fake_rankers())
    routers = (tuning_router(LocalTuningService(desk)),)
    app = create_app(FakeImageService(), HttpSettings(), ranking=ranking, routers=routers)
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_every_answer_is_documented(api: Any) -> None:
    """Its status, its content type, its headers and its form, for requests that the document allows and for those that
    it forbids; and none is a failure of the server."""
    from schemathesis import GenerationMode

    calls: Counter[tuple[str, int]] = Counter()
    for found in api.get_all_operations():
        operation = found.ok()
        ask(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), calls)
        if any(map(len, (operation.query, operation.headers, operation.body))):  # nothing is wrong in a path
            ask(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), calls)
    assert sum(calls.values()) >= MIN_CALLS, calls
    assert {status for _, status in calls} >= {200, 400, 404}, calls
    assert len({operation for operation, status in calls if status < 300}) > 15, calls


def ask(cases: st.SearchStrategy[Any], calls: Counter[tuple[str, int]]) -> None:
    """Makes requests of one kind; half of those about a model are about one that there is."""
    from schemathesis.specs.openapi import checks

    conforms = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]

    @settings(max_examples=CALLS, suppress_health_check=list(HealthCheck))
    @given(cases, st.booleans())
    def asked(case: Any, known: bool) -> None:
        if known:
            case.path_parameters.update({name: KNOWN[name] for name in case.path_parameters if name in KNOWN})
        response = case.call()
        calls[f"{case.method} {case.path}", response.status_code] += 1
        assert response.status_code not in (500, 501, 502)
        case.validate_response(response, checks=conforms)

    asked()
