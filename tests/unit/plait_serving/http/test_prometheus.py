"""What Prometheus makes of `/metrics`: by outcome, by promtool's rules, and in the alert."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from fakes.ranking import fake_rankers
from plait_serving.cores import HostCores
from plait_serving.deployments.images.counted import counted
from plait_serving.diffusion.errors import DeadlineMissed, EngineStopped, NumericalError, Overloaded
from plait_serving.diffusion.request_registry import EngineStatistics, TenantUsage
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService
from plait_serving.replica_metrics import exposition, tenant_families
from support.http_app import AsgiCall, make_app, make_client
from support.http_rank import INFER, arrays, as_json
from support.http_rank import make_client as make_ranking_client
from support.prometheus import found, lint, total
from support.waiting import until

URL = "/v1/images/generations"
ALERTS = Path(__file__).resolve().parents[4] / "deploy" / "dashboards" / "alerts.yaml"


@pytest.fixture(autouse=True)
def heard(monkeypatch):
    """Whatever a replica of another test did with the loggers of its process."""
    monkeypatch.setattr(logging.getLogger("plait"), "propagate", True)


PROBES = "/health|/v2/.*(health|ready).*"


def test_the_alert_compares_failures_with_answers():
    """Probes aside."""
    rules = yaml.safe_load(ALERTS.read_text())["spec"]["groups"][0]["rules"]
    (expression,) = (rule["expr"] for rule in rules if rule["alert"] == "PlaitFails")
    failed, all_of_them = (
        f'sum(max without (instance, pod) (rate(plait_requests_total{{{which}route!~"{PROBES}"}}[5m])))'
        for which in ('outcome="failed",', "")
    )
    assert " ".join(expression.split()) == f"{failed} / {all_of_them} > 0.01"


def heads_of(text: str) -> list[str]:
    """What a text says but for numbers: names, what they are, and the labels of each."""
    samples = re.findall(r"^(\w+)(?:\{(.*)\})? ", text, re.MULTILINE)
    labelled = {name + "{" + ",".join(re.findall(r'(\w+)="', labels)) + "}" for name, labels in samples}
    return sorted({*re.findall(r"^# .*$", text, re.MULTILINE), *labelled})


def test_names_and_labels_are_those_that_dashboards_know():
    """Of a server of both workloads that has answered once. Whoever changes one changes the alerts of others."""
    service, engine = FakeImageService(), counted(counted_engine(), HostCores(cores=2, planned_threads=2))

    async def counts():
        return [engine]

    service.counts = counts
    client = TestClient(create_app(service, HttpSettings(), ranking=LocalRankingService(fake_rankers())))
    assert client.post(URL, json={"prompt": "x"}).status_code == 200
    assert client.post(INFER, json=as_json(arrays(3))).status_code == 200
    client.get("/metrics")
    golden = Path(__file__).with_name("metrics.txt")
    found = "\n".join(heads_of(client.get("/metrics").text)) + "\n"
    if os.environ.get("PLAIT_GOLDEN") == "write":
        golden.write_text(found)
    assert found == golden.read_text()


def test_a_first_failure_is_seen():
    """Prometheus sees no increase where a series begins at 1, so each begins at 0; by model, too."""
    client = make_client(FakeImageService())
    client.get("/metrics")
    text = client.get("/metrics").text
    for model in ("", "emoji"):
        for code in ("200", "429", "500", "503", "504"):
            assert found(text, "plait_requests_total", route=URL, code=code, model=model) == [0.0]


@pytest.mark.parametrize(
    ("error", "code", "outcome"),
    [
        (Overloaded("full"), 429, "refused"),
        (EngineStopped("gone"), 503, "failed"),
        (DeadlineMissed("late"), 504, "failed"),
        (NumericalError("NaN"), 500, "failed"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_ends_in_an_error_is_counted_and_logged_as_that(error, code, outcome, is_stream, caplog):
    """Whether its status line says so or the last event of a stream that began with 200; none but a refusal is no
    failure."""
    client = make_client(FakeImageService(failures={"x": error}, fail_at_step=2), HttpSettings(first_event_wait_s=0.0))
    with caplog.at_level(logging.INFO, logger="plait.http.access"):
        answer = client.post(URL, json={"prompt": "x", "stream": is_stream})
    assert answer.status_code == (200 if is_stream else code)
    text = client.get("/metrics").text
    assert total(text, "plait_requests_total", route=URL, code=str(code), outcome=outcome, model="emoji") == 1
    assert total(text, "plait_requests_total", route=URL) == 1
    assert logged(caplog) == [str(code)]


async def test_a_stream_whose_client_left_is_no_success(caplog):
    """It ends as 499, one that had all of its events as 200, however soon its client hangs up."""
    service = FakeImageService(step_s=0.05)
    app = make_app(service, HttpSettings(first_event_wait_s=0.0))
    body = {"prompt": "x", "stream": True, "num_inference_steps": 50}
    with caplog.at_level(logging.INFO, logger="plait.http.access"):
        left = AsgiCall(app, json.dumps(body).encode())
        await left.wait_chunk()
        left.disconnect()
        await left.done()
        whole = AsgiCall(app, json.dumps({**body, "num_inference_steps": 1}).encode())
        await until(lambda: any(b"completed" in chunk for chunk in whole.chunks))
        whole.disconnect()
        await whole.done()
    text = TestClient(app).get("/metrics").text
    assert total(text, "plait_requests_total", route=URL, code="499", outcome="cancelled", model="emoji") == 1
    assert total(text, "plait_requests_total", route=URL, code="200") == 1
    assert total(text, "plait_cancelled_total") == 1
    assert logged(caplog) == ["499", "200"]


def logged(caplog):
    """The statuses of image requests in the access log."""
    lines = [each.getMessage().split() for each in caplog.records if each.name == "plait.http.access"]
    return [status for method, _, status, *_ in lines if method == "POST"]


def test_promtool_has_nothing_against_what_is_counted():
    """Its rules for the metrics of HTTP, of the engine and of rankers. Images take seconds and rankings milliseconds;
    the durations of both have bounds of 3 and 4 s."""
    images = make_client(FakeImageService(failures={"busy": Overloaded("full")}))
    for prompt in ("x", "busy"):
        images.post(URL, json={"prompt": prompt})
    ranking = make_ranking_client()
    ranking.post(INFER, json=as_json(arrays()))
    of_images, of_rankings = ("request_duration", "stage"), ("rank_request_duration", "rank_duration")
    for client, names in ((images, of_images), (ranking, of_rankings)):
        text = client.get("/metrics").text
        assert list(lint(text)) == []
        for name in names:
            assert all(found(text, f"plait_{name}_seconds_bucket", le=bound) for bound in ("3.0", "4.0"))
    assert found(text, "plait_rank_request_duration_seconds_bucket", le="0.001")
    engine = counted(counted_engine(), HostCores(cores=2, planned_threads=2))
    assert list(lint(exposition([*engine.families, *tenant_families([engine])]))) == []


def counted_engine():
    """An engine with a model and a tenant, as far as it is counted."""
    audit = SimpleNamespace(checked=1, drifted=0, skipped=0, failed=0, largest=0.5)
    lora = SimpleNamespace(resident_bytes=1, resident=1, hits=1, misses=1, evictions=1)
    resident = SimpleNamespace(nbytes=1, budget_bytes=2, loads=1, resident=("emoji",))
    family = SimpleNamespace(auditor=SimpleNamespace(statistics=lambda: audit))
    models = {"emoji": SimpleNamespace(loras=SimpleNamespace(statistics=lambda: lora), family=family)}
    return SimpleNamespace(
        statistics=EngineStatistics,
        usage=lambda: {"acme": TenantUsage(finished=1, compute_s=0.5)},
        pool=SimpleNamespace(statistics=lambda: resident, models=models, prepared={"unet"}),
    )


def test_the_rules_find_what_promtool_finds():
    """Each of them."""
    names = ("a_total", "a_count", "aB", "a_milliseconds", "a_ms")
    complaints = ["non-counter", "should have", "histograms", "camelCase", "base", "abbreviated", "no help", "twice"]
    text = "".join(f"# TYPE {name} gauge\n{name} 1\n{name} 2\n" for name in names)
    said = "\n".join(lint(f"{text}# TYPE a_x counter\na_x 1\n"))
    assert [complaint for complaint in complaints if complaint in said] == complaints
