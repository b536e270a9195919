"""The fabric's benchmark: one document from small runs, with its ratios and its labels."""

from __future__ import annotations

import pytest

from fakes.bench import calm
from plait_bench import fabric
from plait_bench.benchmark import RATIO, Workload
from plait_bench.fabric import links, round_trips, throughput, transports
from plait_bench.runner import BenchResult, RunPlan, joined, run


def measured(workload: Workload, rounds: int = 1) -> BenchResult:
    """All of one workload."""
    benchmark = (workload,)
    return joined(list(run(benchmark, RunPlan(rounds=rounds), say=lambda _: None, look=calm)))


def test_small_runs_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part measures something in seconds when it is made small, and the far link is as slow as it says."""
    monkeypatch.setattr(throughput, "_PASSES", 1)
    monkeypatch.setattr(throughput, "SOURCE_BYTES", 4 << 20)
    monkeypatch.setattr(round_trips, "_REPEATS", 20)
    monkeypatch.setattr(links, "_SECONDS", 0.05)
    monkeypatch.setattr(links, "_LINKS", (links.FAR,))
    monkeypatch.setattr(links, "SIZES_BYTES", {"64B": 64, "4MiB": 1 << 22})
    monkeypatch.setattr(transports, "SIZES_BYTES", {"64KiB": 1 << 16})
    monkeypatch.setattr(transports, "_SECONDS", 0.05)
    results = [measured(workload()) for workload in fabric.WORKLOADS]
    rows = [row for result in results for row in result.rows if row.unit != RATIO]
    systems = {"plait", "memcpy", "spinning", "blocking", "bare_spinning", "bare_blocking", "model", "tcp", "shm"}
    assert systems <= {row.system for row in rows} <= systems | {"nixl", "nixl_tcp"}  # an extra
    assert {row.kind for row in rows if row.system == "model"} == {"modelled"}
    assert {row.kind for row in rows if row.system != "model"} == {"measured"}
    assert all(row.value > 0 for row in rows)
    far = {row.system: row.value for row in rows if row.workload == f"{links.FAR}-64B"}
    assert far["plait"] >= 0.9 * far["model"]
    ratios = {key for result in results for key in result.ratios}
    assert {"shm-1mib:gb_per_s:plait/memcpy", f"{links.FAR}-64B:one_way_us:plait/model"} <= ratios
