"""What tenants may ask for and what they used; refusals and deadlines that do not wait for the engine."""

from __future__ import annotations

import asyncio
import json

import pytest

from fakes.images import FakeImageService
from plait.config import PlaitConfig
from plait.deployments import http_settings
from plait_serving.diffusion.errors import EngineStopped, Overloaded
from plait_serving.http.context import HttpSettings
from plait_serving.http.edge import refusals
from plait_serving.http.edge.limits import TokenBucket
from plait_serving.replica_metrics import ReplicaMetrics
from plait_serving.sections import Role, TenantLimits
from support.http_app import AsgiCall, make_app, make_client
from support.http_rank import INFER, arrays, as_json
from support.http_rank import make_client as make_ranking_client
from support.keys import api_key
from support.prometheus import total
from support.waiting import until

URL = "/v1/images/generations"
KEYS = (
    api_key("sk-acme", tenant="acme"),
    api_key("sk-blue", tenant="blue"),
    api_key("sk-root", tenant="ops", role=Role.ADMIN),
)


def as_tenant(name):
    return {"authorization": f"Bearer sk-{name}"}


def settings(**limits):
    return HttpSettings(api_keys=KEYS, tenants={"acme": TenantLimits(**limits)})


@pytest.mark.parametrize(
    ("limit", "body", "param"),
    [
        ({"max_pixels": 255}, {"size": "16x16"}, "size"),
        ({"max_steps": 3}, {"num_inference_steps": 4}, "num_inference_steps"),
        ({"max_steps": 3}, {}, "num_inference_steps"),  # the model's default is 4
        ({"max_images": 1}, {"n": 2}, "n"),
    ],
)
def test_a_tenants_limits_are_its_own(limit, body, param):
    """Its request gets a 400 that names the field and the limit; another tenant's does not."""
    client = make_client(FakeImageService(), settings(**limit))
    refused = client.post(URL, json={"prompt": "x", **body}, headers=as_tenant("acme"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert f"at most {next(iter(limit.values()))} " in refused.json()["error"]["message"]
    assert client.post(URL, json={"prompt": "x", **body}, headers=as_tenant("blue")).status_code == 200


def test_the_engine_learns_whose_a_request_is():
    """With the weight and the bound on queued work that the configuration gives."""
    service = FakeImageService()
    client = make_client(service, settings(weight=2.5, queued_s=30.0))
    for name in ("acme", "blue"):
        assert client.post(URL, json={"prompt": "x"}, headers=as_tenant(name)).status_code == 200
    acme, blue = (request.tenant for request in service.submitted)
    assert (acme.name, acme.weight, acme.queued_s) == ("acme", 2.5, 30.0)
    assert (blue.name, blue.weight, blue.queued_s) == ("blue", 1.0, None)


def test_tenants_come_from_the_configuration():
    """`server.tenants` names tenants that have keys; without keys there is one, "default"."""
    key = {"sha256": KEYS[0].sha256, "tenant": "acme"}
    server = {"api_keys": [key], "tenants": {"acme": {"weight": 2, "max_steps": 30}}}
    found = http_settings(PlaitConfig.model_validate({"server": server}).server)
    assert found.tenants == {"acme": TenantLimits(weight=2, max_steps=30)}
    PlaitConfig.model_validate({"server": {"tenants": {"default": {"requests_per_s": 5}}}})
    with pytest.raises(ValueError, match="no key is of acne"):
        PlaitConfig.model_validate({"server": {"api_keys": [key], "tenants": {"acne": {}}}})


def test_a_bucket_fills_with_time():
    """Two a second: two at once, then one each half second; a long pause saves up one second's worth."""
    bucket = TokenBucket(2.0)
    assert [bucket.take(0.0) for _ in range(3)] == [0.0, 0.0, pytest.approx(0.5)]
    assert bucket.take(0.5) == 0.0
    assert bucket.take(0.6) == pytest.approx(0.4)
    assert [bucket.take(99.0) for _ in range(3)] == [0.0, 0.0, pytest.approx(0.5)]
    slow = TokenBucket(0.1)
    assert [slow.take(0.0), slow.take(0.0)] == [0.0, pytest.approx(10.0)]


def test_too_many_requests_a_second_are_refused_before_their_bodies():
    """429 with the time to wait; images and rankings count alike, other tenants do not."""
    service = FakeImageService()
    client = make_client(service, settings(requests_per_s=0.01))
    assert client.post(URL, json={"prompt": "x"}, headers=as_tenant("acme")).status_code == 200
    refused = client.post(URL, content=b"no json", headers=as_tenant("acme"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
    assert 90 <= int(refused.headers["retry-after"]) <= 100
    assert client.post(URL, json={"prompt": "x"}, headers=as_tenant("blue")).status_code == 200
    assert len(service.submitted) == 2


def test_requests_beyond_the_rate_are_counted_as_refused():
    """Those for images, as those that the engine refuses: of the tenant, and by their reason. They are no account of
    an engine that never answered."""
    service = FakeImageService()
    client = make_client(service, settings(requests_per_s=0.01))
    for path in ("/v1/models", "/v1/models", URL, URL):
        client.request("POST" if path == URL else "GET", path, headers=as_tenant("acme"))
    text = client.get("/metrics", headers=as_tenant("root")).text
    assert total(text, "plait_rejected_total", reason="rate_limited") == 2
    assert total(text, "plait_tenant_image_requests_rejected_total", tenant="acme") == 2

    async def nobody():
        raise EngineStopped("no engine answers")

    service.counts = nobody
    assert client.get("/v1/usage", headers=as_tenant("root")).status_code == 503


def test_rankings_are_counted_by_tenant():
    """`/v1/usage` shows a tenant its own sums, and an admin everybody's."""
    client = make_ranking_client(settings=HttpSettings(api_keys=KEYS))
    for name in ("acme", "acme", "blue"):
        assert client.post(INFER, json=as_json(arrays(3)), headers=as_tenant(name)).status_code == 200
    mine = client.get("/v1/usage", headers=as_tenant("acme")).json()
    assert mine == {
        "object": "list",
        "data": [{"object": "usage", "tenant": "acme", "rankings": 2, "candidates": 6}],
    }
    everybody = client.get("/v1/usage", headers=as_tenant("root")).json()["data"]
    assert [(one["tenant"], one["rankings"]) for one in everybody] == [("acme", 2), ("blue", 1)]
    assert "tenant" not in client.get("/metrics", headers=as_tenant("acme")).text
    text = client.get("/metrics", headers=as_tenant("root")).text
    assert total(text, "plait_tenant_rankings_total", tenant="blue") == 1


def test_the_account_outlives_the_engine():
    """What an engine counted that is gone is still known; one that was silent is not counted twice."""
    service, engines = FakeImageService(), {"e1": 5, "e2": 1}

    async def of_engines():
        return [
            ReplicaMetrics(replica=engine, families=(), account={(engine, "acme", "images"): count})
            for engine, count in engines.items()
        ]

    service.counts = of_engines
    client = make_client(service, HttpSettings(api_keys=KEYS))

    def images():
        return client.get("/v1/usage", headers=as_tenant("acme")).json()["data"][0]["images"]

    assert images() == 6
    del engines["e1"]
    engines["e2"], engines["e3"] = 2, 3
    assert images() == 5 + 2 + 3
    engines["e1"] = 7  # it was only silent
    assert images() == 7 + 2 + 3

    async def nobody():
        raise EngineStopped("no engine answers")

    service.counts = nobody
    assert images() == 12


async def test_a_flood_is_answered_without_the_engine(monkeypatch):
    """The engine refuses once; the next requests of that tenant do not reach it, and their bodies are not read: not
    even one that never comes delays its answer."""
    monkeypatch.setattr(refusals, "HELD_S", 60.0)
    service = FakeImageService(failures={"x": Overloaded("full", retry_after_s=40.0)})
    app = make_app(service, HttpSettings(api_keys=KEYS))
    for body in (b'{"prompt": "x"}', b'{"prompt": "x", "stream": true}', b"no json", None):
        call = AsgiCall(app, body, key="sk-acme")
        await call.done()
        assert (call.status, call.headers["retry-after"]) == (429, "40")
        assert json.loads(b"".join(call.chunks))["error"]["code"] == "overloaded"
    assert len(service.submitted) == 1
    used = app.state.context.metrics.used
    assert used == {("acme", "image_requests_rejected"): 3}  # the engine counts the first itself
    other = AsgiCall(app, b'{"prompt": "y"}', key="sk-blue")
    await other.done()
    assert other.status == 200


async def test_of_many_that_come_at_once_few_reach_the_engine(monkeypatch):
    """All were let in before the first was refused; those that still wait for the catalog then do not ask, too."""
    monkeypatch.setattr(refusals, "HELD_S", 60.0)
    service = FakeImageService(failures={"x": Overloaded("full", retry_after_s=40.0)})
    asked, refused, catalog = [], asyncio.Event(), service.catalog

    async def at_first_for_one():
        asked.append(None)
        if len(asked) > 1:
            await refused.wait()
        return await catalog()

    service.catalog = at_first_for_one
    app = make_app(service)
    calls = [AsgiCall(app, b'{"prompt": "x"}') for _ in range(50)]
    await until(lambda: len(asked) == 50 and 429 in [call.status for call in calls])
    refused.set()
    for call in calls:
        await call.done()
    assert {call.status for call in calls} == {429}
    assert len(service.submitted) == 1
    metrics = app.state.context.metrics
    assert metrics.used == {("default", "image_requests_rejected"): 49}
    assert total(metrics.registry.collect(), "plait_rejected_total", reason="overloaded") == 50


@pytest.mark.parametrize("stuck", ["generate", "catalog"])
async def test_a_deadline_holds_whatever_the_engine_does(stuck):
    """Finding 2: the ingress answers 504 at the deadline, and cancels the work."""
    service = FakeImageService(step_s=3_600.0)
    if stuck == "catalog":
        service.catalog = lambda: asyncio.sleep(3_600.0)
    call = AsgiCall(make_app(service), json.dumps({"prompt": "x", "deadline_ms": 200}).encode())
    await call.done()
    error = json.loads(b"".join(call.chunks))["error"]
    assert (call.status, error["code"], error["param"]) == (504, "deadline_missed", "deadline_ms")
    assert len(service.cancelled) == len(service.submitted) == (stuck == "generate")


async def test_a_streams_deadline_is_its_last_event():
    """The status line is gone by then."""
    service = FakeImageService(step_s=60.0)
    body = {"prompt": "x", "deadline_ms": 1500, "stream": True}
    call = AsgiCall(make_app(service, HttpSettings(first_event_wait_s=0.0)), json.dumps(body).encode())
    await call.done()
    assert call.status == 200
    assert b"deadline_missed" in call.chunks[-1]
    assert len(service.cancelled) == 1
