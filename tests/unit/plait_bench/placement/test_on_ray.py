"""The workload on a Ray of several nodes: what is played, and its rows. The play itself is in tests/integration."""

from __future__ import annotations

from contextlib import contextmanager

from fakes.bench import measured
from plait_bench.placement import on_ray
from plait_bench.placement.on_ray import SMALL, SYSTEMS, OnRay
from plait_bench.runner import RunPlan


def test_every_step_is_a_workload_of_its_own(monkeypatch):
    """A row for each system, step and metric, of one play."""

    @contextmanager
    def nodes():
        yield "nodes"

    def played(system, scenario, there):
        assert (scenario, there) == (SMALL, "nodes")
        stranded = {"plait": 10.0, "ray-spread": 30.0, "ray-pack": 20.0}[system]
        yield "start", {"stranded_pct": stranded, "without_place": 0}
        yield "lost", {"stranded_pct": stranded, "without_place": 1}

    monkeypatch.setattr(on_ray, "local_nodes", nodes)
    monkeypatch.setattr(on_ray, "play", played)
    rows = measured((OnRay("ray", SMALL),), RunPlan(rounds=2)).rows
    found = {(row.system, row.workload, row.metric): row for row in rows}
    assert {system for system, _, _ in found} == set(SYSTEMS)
    assert found["ray-pack", "ray-start", "stranded_pct"].value == 20.0
    assert found["plait", "ray-lost", "without_place"].value == 1.0
    assert found["plait", "ray-lost", "without_place"].n == 1
