"""`plait bench images` on tiny models: one short round of all systems, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes import bench
from fakes.bench import InProcessFleet, tiny_model_folder
from plait_bench import images
from plait_bench.host import host_facts
from plait_bench.images import measured as pixels
from plait_bench.images.fleet import ItemList
from plait_bench.images.orders import ImageSize, size_of, workload
from plait_bench.records import document
from plait_bench.runner import RunPlan
from plait_serving.diffusion.published.architectures import FamilyName
from plait_serving.diffusion.published.scaled import scaled_down
from plait_serving.random_models import DtypeName
from plait_serving.random_models.write import write_model

pytestmark = pytest.mark.slow  # a minute: every system makes the images of two workloads

# mixed16 has plain orders and orders with each ControlNet: `single` and `controlnet` would show nothing more.
WORKLOADS = ("lora", "mixed16")
# Ours is the engine in this process: a server is more than a minute allows.
SYSTEMS = ("plait_engine", "diffusers_fair", "diffusers", "diffusers_batched")


def _document(folder: Path, size: ImageSize, names: Sequence[str]) -> Mapping[str, Any]:
    """The document of one round over the warm-up orders of every workload."""
    pytest.importorskip("peft", reason="the peers read LoRA files with PEFT")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pixels, "MAX_DIFFERENCE_LEVELS", 2)  # else the run stops: all make the same pictures
        patched.setattr(images, "workload", lambda name, size: _shortened(workload(name, size)))
        workloads = images.on_fleets(folder, [size], names, SYSTEMS, open_fleet=InProcessFleet, host_cores=1)
    try:
        with torch.compiler.set_stance("force_eager"):  # compiling takes minutes
            result = bench.measured(workloads, RunPlan(rounds=1, trials=1, settles=False))
    finally:
        torch.set_num_threads(threads)
    return document("images", "abc123", host_facts(), result)


def _shortened(items: ItemList) -> ItemList:
    """Three orders of few steps; of the mixed ones one with each ControlNet, and one without.

    The stock pipeline loads a LoRA for seconds: it proves its agreement where that is the point, with two.
    """
    orders = {order.control[0] if order.control else "": order for order in items.warm_up}
    short = (*orders.values(), *items.warm_up)[: 2 if items.name == "lora" else 3]
    return replace(items, items=short, warm_up=short[:1])


def test_every_system_makes_the_pictures_of_every_workload(tmp_path):
    """Within two levels of the peers': else the run would have stopped. There are rates, and ratios to each peer."""
    measured = _document(tiny_model_folder(tmp_path), size_of("starter"), WORKLOADS)
    assert measured["left_out"] == {}
    rates = [row for row in measured["rows"] if row["metric"] == "images_per_s"]
    assert all(row["value"] > 0 for row in rates)
    assert {(row["workload"], row["system"]) for row in rates} == set(product(WORKLOADS, SYSTEMS[:3]))
    assert len(measured["ratios"]) == len(rates) - len(WORKLOADS)


def test_a_transformer_makes_the_pictures_of_the_peers(tmp_path):
    """Stable Diffusion 3.5 without T5, in small, at the size's own schedule."""
    size = size_of("sd35m")
    small = scaled_down(FamilyName.SD35_MEDIUM)
    write_model(small.without_t5(), tmp_path / size.base, seed=0, dtype=DtypeName.FLOAT32, report=lambda *_: None)
    rows = _document(tmp_path, size, ("same4",))
    ratios = {f"sd35m-same4:images_per_s:plait_engine/{peer}" for peer in SYSTEMS[1:]}
    assert {key for key in rows["ratios"] if "images_per_s" in key} == ratios
