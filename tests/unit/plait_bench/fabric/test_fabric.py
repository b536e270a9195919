"""The fabric's benchmark: one document from small runs, with its ratios and its labels."""

from __future__ import annotations

import pytest

from plait_bench import fabric
from plait_bench.errors import BenchError
from plait_bench.fabric import links, round_trips, throughput
from plait_bench.fabric.values import RoundValue
from plait_bench.tables import table


def test_rounds_become_rows_and_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of all rounds are one row; ratios are taken round by round; what a model says stays labelled."""
    values = iter([1.0, 3.0])

    def take() -> list[RoundValue]:
        value = next(values)
        return [
            RoundValue(workload="w", system="plait", metric="one_way_us", value=value),
            RoundValue(workload="w", system="model", metric="one_way_us", value=2.0, kind="modelled"),
        ]

    monkeypatch.setattr(fabric, "WORKLOADS", {"modelled-links": take})
    result = fabric.measure(rounds=2, only=["modelled-links"], say=lambda _: None)
    assert [(row.system, row.value, row.n, row.kind) for row in result.rows] == [
        ("plait", 2.0, 2, "measured"),
        ("model", 2.0, 2, "modelled"),
    ]
    assert result.ratios["w:one_way_us:plait/model"].value == 1.0


def test_unknown_workloads_are_named() -> None:
    """A workload that is not there is refused with those that are."""
    with pytest.raises(BenchError, match=r"'infiniband'.*shm-1mib"):
        fabric.measure(rounds=1, only=["infiniband"], say=lambda _: None)


def test_small_runs_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part measures something in seconds when it is made small, and the far link is as slow as it says."""
    monkeypatch.setattr(throughput, "_PASSES", 1)
    monkeypatch.setattr(throughput, "SOURCE_BYTES", 4 << 20)
    monkeypatch.setattr(round_trips, "_REPEATS", 20)
    monkeypatch.setattr(links, "_SECONDS", 0.05)
    monkeypatch.setattr(links, "_LINKS", (links.FAR,))
    monkeypatch.setattr(links, "SIZES_BYTES", {"64B": 64, "4MiB": 1 << 22})
    taken = [*throughput.take(), *round_trips.take(), *links.take()]
    assert {one.system for one in taken} == {"plait", "memcpy", "spinning", "blocking", "model"}
    assert {one.kind for one in taken if one.system == "model"} == {"modelled"}
    assert all(one.value > 0 for one in taken)
    far = {one.system: one.value for one in taken if one.workload == f"{links.FAR}-64B"}
    assert far["plait"] >= 0.9 * far["model"]


def test_tables_label_what_a_model_says() -> None:
    """README's table of a run shows ours beside the model, which is labelled modelled."""
    host = {"date": "2026-11-21T10:00:00+00:00", "cpu": "c", "cores": 2, "ram_gib": 4.0, "python": "3.11"}
    row = {"bench": "fabric", "commit": "abc", "host": host, "workload": "100g-1MiB", "metric": "one_way_us"}
    row |= {"unit": "us", "layout": "", "n": 1, "p20": 1.0, "p80": 1.0}
    run = [
        row | {"system": "plait", "value": 88.5, "kind": "measured"},
        row | {"system": "model", "value": 87.9, "kind": "modelled"},
        row | {"system": "plait/model", "unit": "ratio", "value": 1.007, "kind": "measured"},
    ]
    shown = table(run, ["one_way_us"])
    assert "| `100g-1MiB` | us one way | 88.5 | 87.9 (modelled) | **1.01**" in shown
