"""`plait bench images` on tiny models: one short round of all systems, in this process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait_bench.document import document
from plait_bench.fleet.values import ItemList
from plait_bench.host import host_facts
from plait_bench.images import definition
from plait_bench.runner import RunPlan
from support.bench import InProcessFleet, run_on_fleets, tiny_model_folder

pytestmark = pytest.mark.slow  # a minute: every system makes the images of three workloads

# mixed16 has plain orders and orders with each ControlNet: `single` and `controlnet` would show nothing more.
WORKLOADS = ("lora", "same16", "mixed16")
# Ours is the engine in this process: a server is more than a minute allows.
SYSTEMS = ("plait_engine", "diffusers_fair", "diffusers", "diffusers_batched")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The document of one round over the warm-up orders of every workload."""
    pytest.importorskip("peft", reason="the peers read LoRA files with PEFT")
    benchmark = definition(tiny_model_folder(tmp_path_factory.mktemp("bench")), only=WORKLOADS, named=SYSTEMS)
    short = tuple(_shortened(workload) for workload in benchmark.workloads)
    threads = torch.get_num_threads()
    try:
        result = run_on_fleets(
            replace(benchmark, workloads=short),
            RunPlan(rounds=1, trials=1, settles=False),
            cores=1,
            open_fleet=InProcessFleet,
        )
    finally:
        torch.set_num_threads(threads)
    return document("images", "abc123", host_facts(), result)


def _shortened(workload: ItemList) -> ItemList:
    """Three orders of few steps; of the mixed ones one with each ControlNet, and one without.

    The stock pipeline loads a LoRA for seconds: it proves its agreement where that is the point, with two.
    """
    orders = {item["control"][0] if item["control"] else "": item for item in workload.warm_up}
    items = (*orders.values(), *workload.warm_up)[: 2 if workload.name == "lora" else 3]
    systems = frozenset(workload.systems or SYSTEMS)
    if not workload.one_by_one:
        systems -= {"diffusers"}
    return replace(workload, items=items, warm_up=items[:1], systems=systems)


def test_every_system_makes_the_same_pictures(measured):
    """Ours and the peers' images agree within rounding for every workload: else the run would have stopped."""
    compared: dict[str, set[str]] = {}
    for row in measured["rows"]:
        if row["metric"] == "largest_pixel_difference":
            compared.setdefault(row["workload"], set()).add(row["system"])
            assert row["value"] <= 2
    assert set(compared) == set(WORKLOADS)
    assert all("plait_engine" in systems for systems in compared.values())


def test_the_document_has_seconds_and_rates_and_ratios(measured):
    """For each workload and system that took part; ours against each peer."""
    assert measured["left_out"] == {}
    for workload in WORKLOADS:
        systems = {row["system"] for row in measured["rows"] if row["workload"] == workload}
        for metric in ("seconds_per_image", "images_per_s"):
            rows = [row for row in measured["rows"] if (row["workload"], row["metric"]) == (workload, metric)]
            assert {row["system"] for row in rows} == systems
            assert all(row["value"] > 0 for row in rows)
        assert measured["ratios"][f"{workload}:images_per_s:plait_engine/diffusers_fair"] > 0
    assert "lora:images_per_s:plait_engine/diffusers" in measured["ratios"]
    assert "same16:images_per_s:plait_engine/diffusers_batched" in measured["ratios"]
