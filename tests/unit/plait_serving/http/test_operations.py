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
from fakes.ranking import FakeRanker
from plait_serving.diffusion.errors import EngineStopped, NumericalError, Overloaded
from plait_serving.health import Health
from plait_serving.http import operations
from plait_serving.http.app import app_from_context
from plait_serving.http.context import HttpSettings, RouteContext
from plait_serving.http.edge import body_limit, request_id
from plait_serving.http.edge.auth import ANYONE, ApiKey, Principal, Role, authenticate
from plait_serving.http.edge.body_limit import MAX_JSON_VALUES
from plait_serving.http.edge.errors import ApiError
from plait_serving.http.edge.hosts import LOOPBACK_HOSTS
from plait_serving.http.edge.json_body import JsonRoute
from support.http_app import AsgiCall, b64, make_app, make_client, png
from support.http_rank import INFER, arrays, as_json
from support.http_rank import make_client as make_ranking_client
from support.log_file import log_file
from support.prometheus import found, total
from support.waiting import until

__all__ = ["log_file"]

URL = "/v1/images/generations"
USER = ApiKey.from_secret("sk-user", tenant="acme", role=Role.USER)
ADMIN = ApiKey.from_secret("sk-admin", tenant="ops", role=Role.ADMIN)


@pytest.fixture
def client():
    return make_client(FakeImageService())


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


def test_health_is_503_with_a_reason_until_it_is_200():
    """Readiness means that a warm-up image was made."""
    service = FakeImageService(health=Health(ready=False, reason="the warm-up image is not made yet"))
    client = make_client(service)
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "the warm-up image is not made yet"
    service.state = Health(ready=True, warmup_s=1.5)
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["status"], answer.json()["warmup_s"]) == (200, "ok", 1.5)


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


@pytest.mark.parametrize("workload", ["ranking", "rankings", ""])
def test_the_health_of_a_workload_that_is_not_served_is_a_mistake(client, workload):
    """A probe for it would wait for ever."""
    answer = client.get("/health", params={"workload": workload})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "workload")
    assert answer.json()["error"]["message"] == "workload is images here"


def test_version_says_which(client):
    """Name and version."""
    assert client.get("/version").json()["name"] == "plait"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*|unknown", client.get("/version").json()["version"])


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "unknown_route"),
        ("GET", "/v1", 404, "unknown_route"),
        ("GET", URL, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/doc", 404, "unknown_route"),
        ("GET", "/redoc", 404, "unknown_route"),
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


def test_the_schema_is_served_and_describes_the_fields(client):
    """/openapi.json names our extensions and the error form."""
    schema = client.get("/openapi.json").json()
    body = schema["components"]["schemas"]["GenerationBody"]
    assert {"prompt", "loras", "controlnets", "deadline_ms", "lora_policy"} <= set(body["properties"])
    assert body["additionalProperties"] is False
    assert "ErrorBody" in schema["components"]["schemas"]
    assert set(schema["paths"][URL]["post"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("given", ["a", "req-1_2.3", "x" * 128])
def test_a_well_formed_request_id_is_echoed(client, given):
    """The caller's id is the answer's id, in the header and in the body."""
    answer = client.post(URL, json={"prompt": "x"}, headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given
    assert answer.json()["id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "http://h/", "a\tb", "ä"])
def test_any_other_request_id_is_replaced(client, given):
    """An id that could inject something into logs or URLs is not carried around."""
    answer = client.get("/version", headers={"x-request-id": given.encode("latin-1")})
    assert re.fullmatch(r"req_[0-9a-f]{24}", answer.headers["x-request-id"])


def test_the_engine_gets_unique_ids_even_if_a_client_repeats_one():
    """Two requests with one x-request-id are two requests."""
    service = FakeImageService()
    client = make_client(service)
    for _ in range(2):
        client.post(URL, json={"prompt": "x"}, headers={"x-request-id": "same"})
    ids = [request.request_id for request in service.submitted]
    assert len(set(ids)) == 2
    assert all(each.startswith("same.") for each in ids)


def test_the_ranker_gets_unique_ids_even_if_a_client_repeats_one():
    """As the engine does."""
    ranker = FakeRanker()
    client = make_ranking_client(ranker)
    for _ in range(2):
        assert client.post(INFER, json=as_json(arrays()), headers={"x-request-id": "same"}).status_code == 200
    ids = [request.request_id for request in ranker.ranked]
    assert len(set(ids)) == 2
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
    service = FakeImageService(failures={"busy": Overloaded("full"), "nan": NumericalError("NaN")})
    client = make_client(service)
    client.post(URL, json={"prompt": "x", "n": 2})
    client.post(URL, json={"prompt": "x", "stream": True})
    client.post(URL, json={"prompt": "nan"})
    client.post(URL, json={"prompt": "x", "n": 0})
    client.post(URL, json={"prompt": "busy"})
    got = metrics_of(client)
    for outcome, count in (("ok", 2), ("refused", 1), ("failed", 1), ("bad_request", 1)):
        assert total(got, "plait_requests_total", route=URL, outcome=outcome) == count
    assert total(got, "plait_images_total") == 3
    assert total(got, "plait_rejected_total", reason="overloaded") == 1
    assert total(got, "plait_stage_seconds_sum", stage="denoise") == 2.0
    assert total(got, "plait_request_duration_seconds_count", route=URL) == 5
    assert total(got, "plait_requests_in_flight") == 0
    assert total(got, "fake_steps_total") > 0


def test_metrics_never_hold_what_users_wrote(client):
    """No prompt, LoRA name, id or unknown path becomes a label."""
    client.post(URL, json={"prompt": "my secret prompt", "loras": [{"name": "noto"}]}, headers={"x-request-id": "myid"})
    client.get("/v1/models/mymodel")
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


def test_the_log_has_one_line_per_request_and_no_prompt(client, caplog):
    """Method, path, status, time and id; never what the user wrote."""
    with caplog.at_level(logging.INFO, logger="plait.http.access"):
        client.post(URL, json={"prompt": "my secret prompt"}, headers={"x-request-id": "myid"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "plait.http.access"]
    assert re.fullmatch(r"POST /v1/images/generations 200 \d+\.\d{3}s myid", line)


def test_a_long_path_is_cut_before_it_is_quoted(client, monkeypatch, caplog):
    """The log has its first 500 characters."""
    seen = []
    monkeypatch.setattr(request_id, "quote", lambda path, safe: (seen.append(path), quote(path, safe))[1])
    with caplog.at_level(logging.INFO, logger="plait.http.access"):
        assert client.get("/" + "%C3%A9" * 10_000).status_code == 404
    assert [len(path) for path in seen] == [500]
    assert f"GET /{'%C3%A9' * 83}% 404" in caplog.text


def test_the_log_does_not_have_the_names_of_kept_images(client, caplog):
    """Whoever knows one gets the image."""
    with caplog.at_level(logging.INFO, logger="plait.http.access"):
        client.get("/v1/images/results/0123456789-secret.png", headers={"x-request-id": "myid"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "plait.http.access"]
    assert re.fullmatch(r"GET /v1/images/results/\.\.\. 404 \d+\.\d{3}s myid", line)


@pytest.mark.parametrize(
    "path", ["/v1/models%0aPOST%20/x%20200%200.001s%20forged", "/%1b[31mred", "/x%0d%0a", "/" + "x" * 5000]
)
def test_a_path_forges_no_line_of_the_log(client, caplog, path):
    """What was percent-encoded is so in the log, and no longer than it helps (finding 12)."""
    with caplog.at_level(logging.INFO, logger="plait.http.access"):
        client.get(path, headers={"x-request-id": "myid"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "plait.http.access"]
    assert line.isprintable()
    assert re.fullmatch(r"GET /[^ ]{1,500} 404 \d+\.\d{3}s myid", line)


def test_two_host_headers_are_refused_unless_both_are_the_servers_own():
    """Which of them a proxy before the server believed is unknown (finding 12)."""
    client = make_client(FakeImageService(), HttpSettings(allowed_hosts=LOOPBACK_HOSTS))
    for hosts, status in ((["127.0.0.1", "evil.example"], 403), (["evil.example", "localhost"], 403)):
        answer = client.get("/v1/models", headers=[("host", host) for host in hosts])
        assert answer.status_code == status


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip"])
def test_a_compressed_body_is_refused_by_its_encoding(encoding):
    """Not as broken JSON (finding 12)."""
    service = FakeImageService()
    body = gzip.compress(json.dumps({"prompt": "x"}).encode())
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = make_client(service).post(URL, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert service.submitted == []


DUPLICATES = [
    ("prompt", b'{"prompt": "a", "prompt": "b"}'),
    ("seed", b'{"prompt": "a", "seed": 1, "seed": 1}'),
    ("scale", b'{"prompt": "a", "loras": [{"name": "noto", "scale": 1.0, "scale": -1.0}]}'),
    ("prompt", b'{"prompt": "a", "pr\\u006fmpt": "b"}'),
    ("k" * 64, b'{"user": {"' + b"k" * 999 + b'": 1, "' + b"k" * 999 + b'": 2}, "prompt": "a"}'),
]


@pytest.mark.parametrize(("name", "body"), DUPLICATES)
def test_a_body_that_says_something_twice_is_refused(name, body):
    """Which of the two was meant nobody knows, and a proxy may have checked the other one (finding 12)."""
    service = FakeImageService()
    answer = make_client(service).post(URL, content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "duplicate_field", name)
    assert error["message"] == f"{name}: the body has it twice"
    assert service.submitted == []


def test_looking_for_duplicates_is_no_work_of_its_own():
    """An object of as many members as a body may have, with the last one twice (finding 12)."""
    members = b",".join(b'"%d":0' % i for i in range(MAX_JSON_VALUES - 20))
    body = b'{"prompt": "a", "user": {' + members + b', "0":0}}'
    answer = make_client(FakeImageService()).post(URL, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "0")


# --- keys --------------------------------------------------------------------------------------------------------


def test_without_keys_everybody_is_an_admin_of_the_default_tenant():
    """The default on 127.0.0.1."""
    assert authenticate(None, ()) == ANYONE == Principal(tenant="default", role=Role.ADMIN)


def test_without_keys_strangers_are_users():
    """Where other machines reach the server, nobody is an admin without a key (finding 8)."""
    stranger = Principal(tenant="default", role=Role.USER)
    assert authenticate(None, (), anyone=stranger) == stranger
    client = make_ranking_client(settings=HttpSettings(anyone=stranger))
    answer = client.post("/v2/repository/models/picks/load", json={})
    assert (answer.status_code, answer.json()["error"]) == (403, "this needs a key with the role admin")
    assert client.get("/v2/models/picks").status_code == 200


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic c2s6", "sk-user", "bearer\tsk-user"])
def test_a_missing_key_is_a_401(header):
    """The answer says how to send one."""
    with pytest.raises(ApiError) as caught:
        authenticate(header, (USER,))
    assert (caught.value.status, caught.value.code) == (401, "missing_api_key")
    assert caught.value.headers == {"www-authenticate": "Bearer"}


@pytest.mark.parametrize("secret", ["sk-use", "sk-userr", "SK-USER", USER.sha256, "\udcff"])
def test_a_wrong_key_is_a_401(secret):
    """Only the exact secret counts; its digest does not."""
    with pytest.raises(ApiError) as caught:
        authenticate(f"Bearer {secret}", (USER, ADMIN))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_a_key_is_its_tenant_and_role():
    """Each key leads to its own principal, whatever the case of the scheme."""
    assert authenticate("Bearer sk-user", (USER, ADMIN)) == Principal(tenant="acme", role=Role.USER)
    assert authenticate("bEaReR  sk-admin ", (USER, ADMIN)) == Principal(tenant="ops", role=Role.ADMIN)


def test_keys_guard_everything_but_health_and_version():
    """Unknown paths need a key too, so nothing can be probed; no body is read before the key."""
    service = FakeImageService()
    client = make_client(service, HttpSettings(api_keys=(USER,), max_body_bytes=1000))
    for path in ("/v1/models", "/v1/loras", "/metrics", "/openapi.json", "/nope"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert client.post(URL, content=b"x" * 5000).status_code == 401
    assert client.get("/health").status_code == 200
    assert client.get("/version").status_code == 200
    good = {"authorization": "Bearer sk-user"}
    assert client.get("/v1/models", headers=good).status_code == 200
    assert client.post(URL, json={"prompt": "x"}, headers=good).status_code == 200
    assert len(service.submitted) == 1


# --- body size ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_a_413(chunked):
    """Refused by its declared length, or as soon as a chunked body is too long; nothing is submitted."""
    service = FakeImageService()
    client = make_client(service, HttpSettings(max_body_bytes=2000))
    body = json.dumps({"prompt": "x" * 3000}).encode()
    content = (body[i : i + 500] for i in range(0, len(body), 500)) if chunked else body
    answer = client.post(URL, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert service.submitted == []


def test_a_body_at_the_limit_passes():
    """The limit is inclusive."""
    body = json.dumps({"prompt": "x" * 100}).encode()
    client = make_client(FakeImageService(), HttpSettings(max_body_bytes=len(body)))
    assert client.post(URL, content=body, headers={"content-type": "application/json"}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(chunked):
    """Parsing holds the interpreter, and with it every other answer (finding 4); a long text costs nothing."""
    service = FakeImageService()
    client = make_client(service)
    headers = {"content-type": "application/json"}
    body = b'{"prompt": "x", "user": [' + b"[]," * MAX_JSON_VALUES
    content = iter([body[:70_000], body[70_000:]]) if chunked else body
    answer = client.post(URL, content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert "300,000 values" in answer.json()["error"]["message"]
    assert service.submitted == []
    body = json.dumps({"prompt": ",[{" * 10_000, "user": "A" * 2_000_000}).encode()
    assert client.post(URL, content=body, headers=headers).status_code in (200, 400)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nope", "/v1/images/results/x"])
def test_a_long_query_is_refused_before_it_is_taken_apart(client, path):
    """No route takes more than a number."""
    assert client.get(f"{path}?{'a&' * 1_000}").status_code == client.get(path).status_code
    answer = client.get(f"{path}?{'a&' * 1_025}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (414, "query_too_long")


def test_all_bodies_together_are_bounded():
    """What is held for requests in flight counts; who would exceed it, or hold more than he leaves for others, is told
    to come back, and then may."""
    body = json.dumps({"prompt": "x" * 900}).encode()
    headers = {"content-type": "application/json"}
    tight = HttpSettings(max_bodies_bytes=2 * len(body) - 1)
    for content in (body, iter([body[:500], body[500:]])):
        service = FakeImageService()
        answer = make_client(service, tight).post(URL, content=content, headers=headers)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        assert service.submitted == []
    client = make_client(FakeImageService(), HttpSettings(max_bodies_bytes=2 * len(body)))
    for content in (body, iter([body[:500], body[500:]]), body):
        assert client.post(URL, content=content, headers=headers).status_code == 200


async def test_a_body_counts_until_its_request_is_answered():
    """A second body does not fit while the first request runs, and fits when its client has gone."""
    body = json.dumps({"prompt": "x" * 900}).encode()
    service = FakeImageService(step_s=60.0)
    app = make_app(service, HttpSettings(max_bodies_bytes=2 * len(body) + 10))
    first = AsgiCall(app, body)
    await until(lambda: bool(service.submitted))
    second = AsgiCall(app, body)
    await second.done()
    assert second.status == 429
    first.disconnect()
    await first.done()
    third = AsgiCall(app, body)
    await until(lambda: len(service.submitted) == 2)
    third.disconnect()
    await third.done()


async def test_no_tenant_holds_more_than_it_leaves_for_others():
    """Bodies of one that is alone hold half of all; another one's still fits, and theirs shrink as more come."""
    body = json.dumps({"prompt": "x" * 900}).encode()
    service = FakeImageService(step_s=60.0)
    keys = tuple(ApiKey.from_secret(name, tenant=name) for name in "abc")
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
        assert client.post(URL, content=sent, headers={"content-type": "application/json"}).status_code == status


def test_memory_of_large_bodies_goes_back_to_the_system(monkeypatch):
    """However their requests end; small ones are not worth it. Until then a heap keeps it."""
    returned = threading.Semaphore(0)
    monkeypatch.setattr(body_limit, "return_memory", returned.release)
    client = make_client(FakeImageService())
    headers = {"content-type": "application/json"}
    for content, status in ((b'{"prompt": "x"}', 200), (b'"' + b"x" * (8 << 20), 400), (b"[" * (8 << 20), 413)):
        assert client.post(URL, content=content, headers=headers).status_code == status
    assert all(returned.acquire(timeout=60) for _ in range(2))
    assert not returned.acquire(blocking=False)
    monkeypatch.undo()
    body_limit.return_memory()


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


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("127.0.0.1", 200),
        ("LOCALHOST:80", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_a_loopback_server_answers_to_its_own_names_only(host, status):
    """A foreign name in the Host header is a page that points its own domain at this machine."""
    client = make_client(FakeImageService(), HttpSettings(allowed_hosts=LOOPBACK_HOSTS))
    answer = client.get("/v1/models", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "host_not_allowed"


def test_an_ipv6_address_is_met_with_its_brackets():
    """A configuration has none, a header has them."""
    client = make_client(FakeImageService(), HttpSettings(allowed_hosts=("FE80::1",)))
    assert client.get("/v1/models", headers={"host": "[fe80::1]:8000"}).status_code == 200


def test_a_lying_length_does_not_help():
    """A declared length that is no number, or huge, is not trusted."""
    client = make_client(FakeImageService(), HttpSettings(max_body_bytes=2000))
    huge = client.get("/version", headers={"content-length": "9" * 30})
    assert huge.status_code == 413
    assert client.get("/version", headers={"content-length": "abc"}).status_code == 200


def test_several_control_pictures_fit_under_the_default_limit():
    """Four large control images are an ordinary request."""
    image = b64(png(2000, 2000))
    body = {"prompt": "x", "controlnets": [{"name": "edges", "image": image}] * 4}
    assert make_client(FakeImageService()).post(URL, json=body).status_code == 200
