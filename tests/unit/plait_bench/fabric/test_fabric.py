"""The fabric's benchmark: one document from small runs, with its ratios and its labels."""

from __future__ import annotations

import pytest

from fakes.bench import measured
from plait_bench import fabric
from plait_bench.benchmark import RATIO
from plait_bench.runner import RunPlan


def test_small_runs_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part measures something in seconds when it is made small, and the far link is as slow as it says."""
    monkeypatch.setattr(fabric, "_PASSES", 1)
    monkeypatch.setattr(fabric, "SOURCE_BYTES", 4 << 20)
    monkeypatch.setattr(fabric, "_REPEATS", 20)
    monkeypatch.setattr(fabric, "_LEASE_S", 0.05)
    monkeypatch.setattr(fabric, "_LINKS", (fabric.FAR,))
    monkeypatch.setattr(fabric, "LEASES_BYTES", {"64B": 64, "4MiB": 1 << 22})
    monkeypatch.setattr(fabric, "MESSAGES_BYTES", {"64KiB": 1 << 16})
    monkeypatch.setattr(fabric, "_MESSAGE_S", 0.05)
    result = measured(fabric.benchmark(), RunPlan(rounds=1))
    rows = [row for row in result.rows if row.unit != RATIO]
    systems = {"plait", "memcpy", "spinning", "blocking", "bare_spinning", "bare_blocking", "model", "tcp", "shm"}
    assert systems <= {row.system for row in rows} <= systems | {"nixl", "nixl_tcp"}  # an extra
    assert {row.kind for row in rows if row.system == "model"} == {"modelled"}
    assert {row.kind for row in rows if row.system != "model"} == {"measured"}
    assert all(row.value > 0 for row in rows)
    far = {row.system: row.value for row in rows if row.workload == f"{fabric.FAR}-64B"}
    assert far["plait"] >= 0.9 * far["model"]
    assert {"shm-1mib:gb_per_s:plait/memcpy", f"{fabric.FAR}-64B:one_way_us:plait/model"} <= set(result.ratios)
