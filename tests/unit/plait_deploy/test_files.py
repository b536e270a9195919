"""What lies in deploy/ beside the packages: the Dockerfile, the dashboard, the alerts, the burst's arithmetic."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from plait_deploy.on_ray.gauges import gauges

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
HADOLINT = Path(sys.executable).parent / "hadolint"


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "--no-color", file], capture_output=True, text=True, timeout=60, check=False)


def test_the_linter_has_nothing_against_the_dockerfile(tmp_path):
    """hadolint, which does find fault with another one."""
    assert lint(DEPLOY / "Dockerfile").stdout == ""
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN cd /x && pip install plait\n")
    assert lint(tmp_path / "Dockerfile").returncode != 0


def test_the_base_image_is_named_by_a_digest_that_must_be_given():
    """Neither the name nor the digest has a default, so nothing is built without them; no stage begins elsewhere."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert {"ARG BASE", "ARG BASE_SHA256"} <= set(lines)
    stages = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert stages == ["${BASE}@sha256:${BASE_SHA256}"] * 2 + ["cpu"]


def test_the_image_runs_as_nobody_special_with_a_home_and_baked_wheels():
    """The user of the manifests, a home that it may write to, and no index at the end."""
    manifest = (Path(__file__).parent / "kuberay/golden/starter.yaml").read_text()
    text = (DEPLOY / "Dockerfile").read_text()
    for_cpus, for_gpus = text.split("FROM ")[-2:]
    for last in (for_cpus, for_gpus):
        users = re.findall(r"^USER (\d+):", last, re.MULTILINE)
        assert users == sorted(set(re.findall(r"runAsUser: (\d+)", manifest)))
    assert " gcc " in for_gpus  # without it no kernel of Triton runs
    last = for_cpus
    assert "HOME=/home/plait" in last
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"--no-index --find-links /wheels plait=={version}" in last
    assert "XDG_CACHE_HOME=/cache" in last


def metrics_of(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads."""
    return set(re.findall(r"\bplait_\w+", expression))


def expressions() -> dict[str, str]:
    """Every expression of the dashboard and of the alerts, by where it stands."""
    panels = json.loads((DEPLOY / "dashboards" / "plait.json").read_text())["panels"]
    rules = yaml.safe_load((DEPLOY / "dashboards" / "alerts.yaml").read_text())["spec"]["groups"][0]["rules"]
    found = {f"{panel['title']} {it['refId']}": it["expr"] for panel in panels for it in panel["targets"]}
    return found | {rule["alert"]: rule["expr"] for rule in rules}


@pytest.mark.parametrize("where", expressions())
def test_expressions_count_each_proxy_once_and_replicas_by_their_rates(where):
    """Every proxy answers for all replicas: what several report is one thing, so it is never added up as it comes. Then
    replicas are added up, each by its own rate, or the largest is taken; no series is shown by replica."""
    expression = expressions()[where]
    assert metrics_of(expression)
    assert expression.count("(") == expression.count(")")
    if not expression.startswith("absent("):
        summed = re.findall(r"sum(?: by \([^)]*\))? ?\(max without \(instance, pod\)\s+\(", expression)
        largest = expression.count("max without (instance, pod, replica) (")
        assert len(summed) + largest == len(re.findall(r"\bplait_\w+", expression))
        assert all("replica" not in labels for labels in re.findall(r"by \(([^)]*)\)", expression))


def test_dashboards_and_alerts_read_metrics_that_are_there():
    """Of a server, which `test_prometheus` holds to that list; of the cluster's nodes; and what `test_worker` holds a
    ranking worker to."""
    there = set(re.findall(r"\bplait_\w+", (Path(__file__).parents[1] / "plait_serving/http/metrics.txt").read_text()))
    there |= {family.name for family in gauges((), ())} | {"plait_ranker_worker_audit_drifted_total"}
    read = {name for file in (DEPLOY / "dashboards").iterdir() for name in metrics_of(file.read_text())}
    assert len(read) > 20
    assert read - there == set()


def test_every_alert_leads_to_a_part_of_the_runbook():
    """`runbook` names a heading of deploy/README.md."""
    headings = {it.lower() for it in re.findall(r"^#+ (.+)$", (DEPLOY / "README.md").read_text(), re.MULTILINE)}
    rules = yaml.safe_load((DEPLOY / "dashboards" / "alerts.yaml").read_text())["spec"]["groups"][0]["rules"]
    for rule in rules:
        document, _, part = rule["annotations"]["runbook"].partition(": ")
        assert document == "deploy/README.md"
        assert part.lower() in headings, rule["alert"]


@pytest.fixture
def burst():
    spec = importlib.util.spec_from_file_location("burst", DEPLOY / "burst.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("spread", "replicas", "code"),
    [
        ({"a": 9, "b": 3}, None, 0),
        ({"a": 10, "b": 2}, None, 1),
        ({"a": 12}, None, 1),
        ({"a": 10, "b": 8, "gone": 0}, 2, 0),
        ({"a": 10, "b": 8}, 3, 1),
    ],
)
def test_a_burst_spreads_if_every_replica_has_half_of_its_share(burst, spread, replicas, code):
    """With the number of replicas given, one that Ray still reports does not count; one that is missing does."""
    assert burst.verdict(spread, replicas) == code


def test_counts_are_read_when_every_replica_has_reported(burst, monkeypatch):
    """One report reaches the sum while the other's is still to come; without its end the wait is bounded."""
    clock = [0.0]
    passing = SimpleNamespace(
        monotonic=lambda: clock[0], sleep=lambda pause_s: clock.__setitem__(0, clock[0] + pause_s)
    )
    monkeypatch.setattr(burst, "time", passing)
    monkeypatch.setattr(burst, "by_replica", lambda *_: {"a": 11.0, "b": 2.0 if clock[0] < 9 else 11.0})
    assert burst.settled(["here"], "engine", 12) == {"a": 11.0, "b": 11.0}
    monkeypatch.setattr(burst, "by_replica", lambda *_: {"a": clock[0]})
    start_s = clock[0]
    assert burst.settled(["here"], "engine") == {"a": clock[0]}
    assert 60 <= clock[0] - start_s <= 61


def test_a_burst_counts_what_clients_asked_for(burst, tmp_path):
    """Calls without a route are an ingress' own; other deployments and other families count for nothing."""
    series = (
        'ray_serve_deployment_request_counter_total{deployment="engine",replica="a",route="/"} 5.0',
        'ray_serve_deployment_request_counter_total{deployment="engine",replica="a",route=""} 200.0',
        'ray_serve_deployment_request_counter_total{deployment="engine",replica="b",route="/"} 7.0',
        'ray_serve_deployment_request_counter_total{deployment="ingress",replica="c",route="/"} 12.0',
        'ray_serve_deployment_error_counter_total{deployment="engine",replica="a",route="/"} 1.0',
    )
    (tmp_path / "metrics").write_text("\n".join(series))
    assert burst.by_replica([f"file://{tmp_path}/metrics"], "engine") == {"a": 5.0, "b": 7.0}
