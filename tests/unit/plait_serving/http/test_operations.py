"""Everything around the image route: lists, health, version, metrics, keys, body size, request ids, the schema."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import threading
from urllib.parse import quote

import pytest
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from fakes.ranking import FakeRanker, fake_rankers
from plait_serving.diffusion.errors import EngineStopped, NumericalError, Overloaded
from plait_serving.health import Health
from plait_serving.http import operations
from plait_serving.http.app import app_from_context, create_app
from plait_serving.http.context import HttpSettings, RouteContext
from plait_serving.http.edge import limits, request_id
from plait_serving.http.edge.auth import Principal, authenticate
from plait_serving.http.edge.errors import ApiError
from plait_serving.http.edge.json_body import JsonRoute
from plait_serving.http.edge.limits import MAX_JSON_VALUES
from plait_serving.ranking.local import LocalRankingService
from plait_serving.sections import Role
from support.http_app import AsgiCall, make_app, make_client
from support.http_rank import INFER, arrays, as_json
from support.http_rank import make_client as make_ranking_client
from support.keys import api_key
from support.log_file import log_file
from support.prometheus import found, total
from support.waiting import until

__all__ = ["log_file"]

URL = "/v1/images/generations"
JSON = {"content-type": "application/json"}
USER = api_key("sk-user", tenant="acme", role=Role.USER)
ADMIN = api_key("sk-admin", tenant="ops", role=Role.ADMIN)


def metrics_of(client):
    return client.get("/metrics").text


def test_lists_name_what_a_request_may_name(client):
    """Models, LoRAs and ControlNets in OpenAI's list form, with what a page needs to offer them."""
    model = client.get("/v1/models").json()["data"][0]
    assert (model["id"], model["object"], model["default_size"]) == ("emoji", "model", "16x16")
    assert model["limits"]["size_multiple"] == 8
    assert "dpmpp_2m" in model["schedulers"]
    loras = client.get("/v1/loras").json()
    assert loras["object"] == "list"
    assert [(item["id"], item["format"]) for item in loras["data"]] == [("noto", "peft"), ("sketch", "kohya")]
    controlnets = client.get("/v1/controlnets").json()
    assert [(item["id"], item["preprocessor"]) for item in controlnets["data"]] == [("edges", "edges"), ("plain", None)]
    assert controlnets["preprocessors"] == ["edges"]


def test_the_health_of_one_workload_is_not_that_of_the_other():
    """A ranker is asked although no image can be made, and the other way round; together each reason is told."""
    images = FakeImageService(health=Health(ready=False, reason="no engine"))
    ranking = FakeImageService(health=Health(ready=True))
    client = TestClient(app_from_context(RouteContext(images=images, ranking=ranking, settings=HttpSettings())))

    def asked(query=""):
        answer = client.get(f"/health{query}")
        return answer.status_code, answer.json()["reason"]

    assert asked("?workload=ranking") == (200, None)
    assert asked("?workload=images") == asked() == (503, "no engine")
    ranking.state = Health(ready=False, reason="model picks: no HN")
    assert asked("?workload=ranking") == (503, "model picks: no HN")
    assert asked() == (503, "no engine; model picks: no HN")
    images.state = Health(ready=True)
    assert asked("?workload=images") == (200, None)
    assert client.get("/v2/health/ready").status_code == 503


@pytest.mark.parametrize("workload", ["ranking", ""])
def test_the_health_of_a_workload_that_is_not_served_is_a_mistake(client, workload):
    """A probe for it would wait for ever."""
    answer = client.get("/health", params={"workload": workload})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "workload")
    assert answer.json()["error"]["message"] == "workload is images here"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "unknown_route"),
        ("GET", URL, 405, "method_not_allowed"),
        ("GET", "/v1/models/a%00b", 404, "model_not_found"),
        ("GET", "/v1/models/" + "x" * 5000, 404, "model_not_found"),
        ("GET", "/v1/models/a/b", 404, "model_not_found"),
    ],
)
def test_other_routes_answer_in_the_same_form(client, method, path, status, code):
    """404 and 405 are OpenAI errors too; the documentation pages, which would load scripts from a CDN, are off."""
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.headers["x-request-id"]
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/tuning", "/v1/tuning/jobs"])
def test_the_routes_of_tuning_say_what_turns_them_on(client, path):
    """They are there only with one key of the configuration."""
    answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")
    assert answer.json()["error"]["message"].endswith("; tuning.enabled: true turns it on")


@pytest.mark.parametrize(
    ("given", "told"),
    [("req-1_2.3", "req-1_2.3"), ("x" * 128, "x" * 128), ("", None), ("a b", None), ("x" * 129, None), ("ä", None)],
)
def test_a_request_id_is_echoed_or_replaced(client, given, told):
    """The caller's id is the answer's, in header and body. One that could inject something into logs or URLs is not
    carried around."""
    answer = client.post(URL, json={"prompt": "x"}, headers={"x-request-id": given.encode("latin-1")})
    found = answer.headers["x-request-id"]
    assert found == told or (told is None and re.fullmatch(r"req_[0-9a-f]{24}", found))
    assert answer.json()["id"] == found


def test_work_has_unique_ids_even_if_a_client_repeats_one(service, client):
    """Two requests with one x-request-id are two requests."""
    ranker = FakeRanker()
    ranking = make_ranking_client(ranker)
    for _ in range(2):
        client.post(URL, json={"prompt": "x"}, headers={"x-request-id": "same"})
        ranking.post(INFER, json=as_json(arrays()), headers={"x-request-id": "same"})
    for asked in (service.submitted, ranker.ranked):
        ids = {request.request_id for request in asked}
        assert len(ids) == 2
        assert all(each.startswith("same.") for each in ids)


def test_every_line_about_a_request_has_its_id(log_file):
    """Those of a failure as well as that of the access log, once each; a request that is answered leaves one."""
    service = FakeImageService(failures={"nan": NumericalError("NaN"), "bug": ValueError("a bug")})
    client = make_client(service)
    for prompt in ("nan", "bug", "fine"):
        client.post(URL, json={"prompt": prompt}, headers={"x-request-id": f"of-{prompt}"})
    lines = log_file.lines(" plait")
    assert [line.count("of-nan") for line in lines] == [1, 1, 0, 0, 0]
    assert [line.count("of-bug") for line in lines] == [0, 0, 1, 1, 0]
    assert [line.count("of-fine") for line in lines] == [0, 0, 0, 0, 1]


def test_metrics_count_answers_stages_and_refusals():
    """Counters move by what happened, in base units and with few labels; the service's own follow."""
    client = make_client(FakeImageService(failures={"busy": Overloaded("full")}))
    for body in ({"prompt": "x", "n": 2}, {"prompt": "x", "stream": True}, {"prompt": "x", "n": 0}, {"prompt": "busy"}):
        client.post(URL, json=body)
    got = metrics_of(client)
    for outcome, count in (("ok", 2), ("bad_request", 1)):
        assert total(got, "plait_requests_total", route=URL, outcome=outcome) == count
    assert total(got, "plait_images_total") == 3
    assert total(got, "plait_rejected_total", reason="overloaded") == 1
    assert total(got, "plait_stage_seconds_sum", stage="denoise") == 2.0
    assert total(got, "plait_request_duration_seconds_count", route=URL) == 4
    assert total(got, "plait_requests_in_flight") == 0
    assert total(got, "fake_steps_total") > 0


def test_metrics_never_hold_what_users_wrote(client):
    """No prompt, LoRA name, id, unknown model or path becomes a label."""
    client.post(URL, json={"prompt": "my secret prompt", "loras": [{"name": "noto"}]}, headers={"x-request-id": "myid"})
    client.get("/v1/models/mymodel")
    client.post(URL, json={"prompt": "x", "model": "mymodel"})
    client.get("/secretpath")
    text = client.get("/metrics").text
    for word in ("secret", "noto", "myid", "mymodel"):
        assert word not in text


def test_metrics_come_whatever_is_down(monkeypatch):
    """A service that does not answer, or fails, is missing and says so; the others' numbers are there (finding 9)."""
    monkeypatch.setattr(operations, "WAIT_S", 0.01)
    for failure in (None, EngineStopped("no replica")):
        service = FakeImageService()

        async def never(error=failure) -> str:
            if error is not None:
                raise error
            await asyncio.Event().wait()
            raise AssertionError

        up = metrics_of(make_client(service))
        assert (total(up, "plait_service_up", service="images"), len(found(up, "fake_steps_total"))) == (1, 1)
        service.counts = never
        down = metrics_of(make_client(service))
        assert (total(down, "plait_service_up", service="images"), len(found(down, "fake_steps_total"))) == (0, 0)
        assert found(down, "plait_requests_in_flight")
        unknown = make_client(service).get("/v1/usage")  # an account without the engine's would say 0
        assert (unknown.status_code, unknown.headers["retry-after"]) == (503, "1")


@pytest.fixture
def access_line(caplog):
    """Returns the one line of the access log."""
    caplog.set_level(logging.INFO, logger="plait.http.access")

    def line():
        (found,) = [record.getMessage() for record in caplog.records if record.name == "plait.http.access"]
        return found

    return line


@pytest.mark.parametrize(
    ("path", "logged"),
    [
        ("/v1/images/results/0123456789-secret.png", r"/v1/images/results/\.\.\."),  # whoever knows it gets the image
        ("/v1/models%0aPOST%20/x%20200%200.001s%20forged", "/[^ ]+"),
        ("/%1b[31mred", "/[^ ]+"),
        ("/" + "%C3%A9" * 10_000, f"/{'%C3%A9' * 83}%"),
    ],
    ids=["kept image", "line break", "colour", "long"],
)
def test_a_path_forges_no_line_of_the_log(client, access_line, monkeypatch, path, logged):
    """What was percent-encoded is so in the log, and no longer than it helps (finding 12): it is cut before it is
    quoted."""
    quoted = []
    monkeypatch.setattr(request_id, "quote", lambda path, safe: (quoted.append(path), quote(path, safe))[1])
    assert client.get(path, headers={"x-request-id": "myid"}).status_code == 404
    assert re.fullmatch(rf"GET {logged} 404 \d+\.\d{{3}}s myid", access_line())
    assert access_line().isprintable()
    assert max(map(len, quoted)) <= 500


def test_the_log_has_no_prompt(client, access_line):
    """Method, path, status, time and id; never what the user wrote."""
    client.post(URL, json={"prompt": "my secret prompt"}, headers={"x-request-id": "myid"})
    assert re.fullmatch(r"POST /v1/images/generations 200 \d+\.\d{3}s myid", access_line())


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_a_compressed_body_is_refused_by_its_encoding(service, encoding):
    """Not as broken JSON (finding 12)."""
    body = gzip.compress(json.dumps({"prompt": "x"}).encode())
    answer = make_client(service).post(URL, content=body, headers={**JSON, "content-encoding": encoding})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert service.submitted == []


DUPLICATES = [
    ("prompt", b'{"prompt": "a", "prompt": "b"}'),
    ("scale", b'{"prompt": "a", "loras": [{"name": "noto", "scale": 1.0, "scale": -1.0}]}'),
    ("prompt", b'{"prompt": "a", "pr\\u006fmpt": "b"}'),
    ("k" * 64, b'{"user": {"' + b"k" * 999 + b'": 1, "' + b"k" * 999 + b'": 2}, "prompt": "a"}'),
]


@pytest.mark.parametrize(("name", "body"), DUPLICATES)
def test_a_body_that_says_something_twice_is_refused(service, name, body):
    """Which of the two was meant nobody knows, and a proxy may have checked the other one (finding 12)."""
    answer = make_client(service).post(URL, content=body, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "duplicate_field", name)
    assert error["message"] == f"{name}: the body has it twice"
    assert service.submitted == []


def test_looking_for_duplicates_is_no_work_of_its_own(client):
    """An object of as many members as a body may have, with the last one twice (finding 12)."""
    members = b",".join(b'"%d":0' % i for i in range(MAX_JSON_VALUES - 20))
    body = b'{"prompt": "a", "user": {' + members + b', "0":0}}'
    answer = client.post(URL, content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "0")


# --- keys --------------------------------------------------------------------------------------------------------


def test_without_keys_strangers_are_users():
    """Where other machines reach the server, nobody is an admin without a key (finding 8)."""
    stranger = Principal(tenant="default", role=Role.USER)
    client = make_ranking_client(settings=HttpSettings(anyone=stranger))
    answer = client.post("/v2/repository/models/picks/load", json={})
    assert (answer.status_code, answer.json()["error"]) == (403, "this needs a key with the role admin")
    assert client.get("/v2/models/picks").status_code == 200


@pytest.mark.parametrize(
    ("header", "code"),
    [
        *((each, "missing_api_key") for each in (None, "", "Bearer ", "Basic c2s6", "sk-user", "bearer\tsk-user")),
        *((f"Bearer {each}", "invalid_api_key") for each in ("sk-use", "sk-userr", "SK-USER", USER.sha256, "\udcff")),
    ],
)
def test_without_a_right_key_it_is_a_401(header, code):
    """Only the exact secret counts; its digest does not. The answer says how to send one."""
    with pytest.raises(ApiError) as caught:
        authenticate(header, (USER, ADMIN))
    assert (caught.value.status, caught.value.code) == (401, code)
    assert caught.value.headers == {"www-authenticate": "Bearer"}


def test_a_key_is_its_tenant_and_role():
    """Whatever the case of the scheme."""
    assert authenticate("Bearer sk-user", (USER, ADMIN)) == Principal(tenant="acme", role=Role.USER)
    assert authenticate("bEaReR  sk-admin ", (USER, ADMIN)) == Principal(tenant="ops", role=Role.ADMIN)


def test_keys_guard_everything_but_probes_and_the_page(service):
    """Unknown paths need a key too, so nothing can be probed; no body is read before the key. The page has nothing in
    it but a question for the key. Refusals have the form of their part of the API."""
    settings = HttpSettings(api_keys=(USER,), max_body_bytes=1000)
    client = TestClient(create_app(service, settings, ranking=LocalRankingService(fake_rankers())))
    for path in ("/health", "/version", "/v2/health/live", "/v2/health/ready", "/", "/docs", "/ui/js/main.js"):
        assert client.get(path).status_code == 200, path
    good, guarded = {"authorization": "Bearer sk-user"}, ("models", "words", "status", "usage", "loras")
    for path in ("/metrics", "/openapi.json", *(f"/v1/{each}" for each in guarded), "/v2", "/v2/models/picks"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
        assert isinstance(answer.json()["error"], str if path.startswith("/v2") else dict)
        assert client.get(path, headers=good).status_code == 200, path
    for path in ("/nope", "/uix", "/ui"):
        assert client.get(path).status_code == 401, path
    for path in (URL, INFER):
        assert client.post(path, content=b"x" * 5000).status_code == 401
        assert client.post(path, content=b"x" * 5000, headers=good).status_code == 413
    assert client.post(URL, json={"prompt": "x"}, headers=good).status_code == 200


# --- body size ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_body_that_is_too_large_is_a_413(service, is_chunked, missing):
    """Refused by its declared length, or as soon as a chunked body is too long; the limit is inclusive."""
    body = json.dumps({"prompt": "x" * 3000}).encode()
    content = (body[i : i + 500] for i in range(0, len(body), 500)) if is_chunked else body
    client = make_client(service, HttpSettings(max_body_bytes=len(body) - missing))
    answer = client.post(URL, content=content, headers=JSON)
    assert answer.status_code == (413 if missing else 200)
    assert not missing or answer.json()["error"]["code"] == "body_too_large"
    assert len(service.submitted) == 1 - missing


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(service, chunked):
    """Parsing holds the interpreter, and with it every other answer (finding 4); a long text costs nothing."""
    client = make_client(service)
    body = b'{"prompt": "x", "user": [' + b"[]," * MAX_JSON_VALUES
    content = iter([body[:70_000], body[70_000:]]) if chunked else body
    answer = client.post(URL, content=content, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert "300,000 values" in answer.json()["error"]["message"]
    assert service.submitted == []
    body = json.dumps({"prompt": ",[{" * 10_000, "user": "A" * 2_000_000}).encode()
    assert client.post(URL, content=body, headers=JSON).status_code in (200, 400)


def test_an_admins_route_reads_no_more_values_from_anybody():
    """A body is parsed before its key's role is asked for, and an update is no tensor, whose route has other limits."""
    client = make_ranking_client(settings=HttpSettings(api_keys=(USER,)))
    headers = {**JSON, "authorization": "Bearer sk-user"}
    body = b'{"parameters": [' + b"[]," * MAX_JSON_VALUES
    answer = client.post("/v2/repository/models/picks/load", content=body, headers=headers)
    assert (answer.status_code, "300,000 values" in answer.json()["error"]) == (413, True)
    assert client.post(INFER, content=body, headers=headers).status_code == 400


@pytest.mark.parametrize("path", ["/v1/models", "/nope"])
def test_a_long_query_is_refused_before_it_is_taken_apart(client, path):
    """No route takes more than a number."""
    assert client.get(f"{path}?{'a&' * 1_000}").status_code == client.get(path).status_code
    answer = client.get(f"{path}?{'a&' * 1_025}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (414, "query_too_long")


def test_all_bodies_together_are_bounded():
    """What is held for requests in flight counts; who would exceed it, or hold more than he leaves for others, is told
    to come back, and then may."""
    body = json.dumps({"prompt": "x" * 900}).encode()
    tight = HttpSettings(max_bodies_bytes=2 * len(body) - 1)
    for content in (body, iter([body[:500], body[500:]])):
        service = FakeImageService()
        client = make_client(service, tight)
        answer = client.post(URL, content=content, headers=JSON)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        assert service.submitted == []
        text = metrics_of(client)
        assert total(text, "plait_rejected_total", reason="overloaded") == 1
        assert total(text, "plait_tenant_image_requests_rejected_total", tenant="default") == 1
    client = make_client(FakeImageService(), HttpSettings(max_bodies_bytes=2 * len(body)))
    for content in (body, iter([body[:500], body[500:]]), body):
        assert client.post(URL, content=content, headers=JSON).status_code == 200


async def test_no_tenant_holds_more_than_it_leaves_for_others():
    """Bodies of one that is alone hold half of all; another one's still fits, and theirs shrink as more come."""
    body = json.dumps({"prompt": "x" * 900}).encode()
    service = FakeImageService(step_s=60.0)
    keys = tuple(api_key(name, tenant=name) for name in "abc")
    app = make_app(service, HttpSettings(api_keys=keys, max_bodies_bytes=8 * len(body)))
    held: dict[str, list[AsgiCall]] = {"a": [], "b": [], "c": []}
    for tenant in "abc":
        while True:
            call = AsgiCall(app, body, key=tenant)
            await until(lambda call=call: call.task.done() or len(service.submitted) > sum(map(len, held.values())))
            if call.task.done():
                assert call.status == 429
                break
            held[tenant].append(call)
    assert {tenant: len(calls) for tenant, calls in held.items()} == {"a": 4, "b": 2, "c": 1}
    for call in held.pop("a"):
        call.disconnect()
        await call.done()
    again = AsgiCall(app, body, key="a")
    await until(lambda: len(service.submitted) == 8)
    for call in (again, *held["b"], *held["c"]):
        call.disconnect()
        await call.done()


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b'{"prompt": 1}', 400), (b"[" * 300_001, 413), (b'{"prompt": "x", "model": "y"}', 404)],
    ids=["syntax", "value", "values", "name"],
)
def test_what_a_refused_body_held_is_given_back(content, status):
    """However its request ends: twenty of half of what is allowed."""
    settings = HttpSettings(max_bodies_bytes=3 * len(content))
    client = make_client(FakeImageService(), settings)
    for _ in range(20):
        sent = iter([content[:1], content[1:]])
        assert client.post(URL, content=sent, headers=JSON).status_code == status


def test_memory_of_large_bodies_goes_back_to_the_system(client, monkeypatch):
    """However their requests end; small ones are not worth it. Until then a heap keeps it."""
    returned = threading.Semaphore(0)
    monkeypatch.setattr(limits, "return_memory", returned.release)
    for content, status in ((b'{"prompt": "x"}', 200), (b'"' + b"x" * (8 << 20), 400), (b"[" * (8 << 20), 413)):
        assert client.post(URL, content=content, headers=JSON).status_code == status
    assert all(returned.acquire(timeout=60) for _ in range(2))
    assert not returned.acquire(blocking=False)
    monkeypatch.undo()
    limits.return_memory()


def test_a_body_that_was_parsed_is_not_kept():
    """Its text lies in what was made of it; the bytes beside it would double what images cost while they are made."""
    kept = []
    router = APIRouter(route_class=JsonRoute)

    @router.post("/x")
    async def look(body: dict, request: Request) -> int:
        kept.append(await request.body())
        return len(body["a"])

    app = FastAPI()
    app.include_router(router)
    client = TestClient(app)
    content = json.dumps({"a": "b" * 1000})
    for kind in ("application/json", "Application/x+JSON; charset=utf-8"):
        answer = client.post("/x", content=content, headers={"content-type": kind})
        assert (answer.status_code, answer.json()) == (200, 1000)
    assert client.post("/x", content=content, headers={"content-type": "text/plain"}).status_code == 422
    assert kept == [b"{", b"{"]


def test_a_lying_length_does_not_help():
    """A declared length that is no number, or huge, is not trusted."""
    client = make_client(FakeImageService(), HttpSettings(max_body_bytes=2000))
    huge = client.get("/version", headers={"content-length": "9" * 30})
    assert huge.status_code == 413
    assert client.get("/version", headers={"content-length": "abc"}).status_code == 200
