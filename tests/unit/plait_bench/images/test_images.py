"""The image benchmark's own parts that need no model: orders, control maps, comparing images, the models' folder."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from plait_bench.errors import BenchError, Disagreement
from plait_bench.fleet.values import RunSample
from plait_bench.images import definition, measures
from plait_bench.images.drawings import control_map
from plait_bench.images.models import open_models
from plait_bench.images.pixels import check, decode, encode
from plait_bench.images.workloads import ImageSpec, workloads


def image(seed=0):
    """Any image."""
    return np.random.default_rng(seed).integers(0, 200, (4, 6, 3), dtype=np.uint8)


def test_orders_survive_the_pipe():
    """What is sent is what is drawn, in every workload."""
    for workload in workloads():
        for item in (*workload.items, *workload.warm_up):
            assert ImageSpec.from_json(item).to_json() == {**item}


def test_workloads_are_the_same_in_every_run():
    """Fixed seeds; an unknown name is an error."""
    assert workloads() == workloads()
    assert [workload.name for workload in workloads()] == ["single", "controlnet", "lora", "same16", "mixed16"]
    with pytest.raises(KeyError):
        workloads(["triple"])


def test_each_order_of_lora_pays_its_switch():
    """No two neighbours have the same set, also from one round to the next."""
    (workload,) = workloads(["lora"])
    sets = [item["loras"] for item in workload.items]
    assert all(one != sets[i - 1] for i, one in enumerate(sets))
    assert all(sets)


def test_same16_agrees_in_everything_but_prompt_and_seed():
    """Otherwise the batched peer would draw something else."""
    (workload,) = workloads(["same16"])
    rest = [{**item, "prompt": "", "seed": 0} for item in workload.items]
    assert len(rest) == 16
    assert all(one == rest[0] for one in rest)
    assert len({item["seed"] for item in workload.items}) == 16
    assert "diffusers_batched" not in (workloads(["mixed16"])[0].systems or ())


def test_a_warm_up_touches_what_its_workload_touches():
    """The same orders with fewer steps."""
    for workload in workloads():
        assert [{**item, "steps": 0} for item in workload.items] == [{**item, "steps": 0} for item in workload.warm_up]
        assert max(item["steps"] for item in workload.warm_up) < 5


def test_measures_are_rates_and_latencies():
    """Four images in two seconds are two per second, half a second each."""
    (single, same) = workloads(["single", "same16"])
    taken = measures(same, RunSample(wall_s=8.0, latencies_s=(4.0,) * 8 + (8.0,) * 8))
    assert taken == {
        "images_per_s": 2.0, "seconds_per_image": 0.5, "mean_latency_s": 6.0,
    }  # fmt: skip
    assert "mean_latency_s" not in measures(single, RunSample(wall_s=1.0, latencies_s=(1.0,)))


@pytest.mark.parametrize("name", ["edges", "colors"])
def test_control_maps_are_pictures_of_something(name):
    """Of the size that was asked for, not flat, and different for neighbouring numbers."""
    maps = [control_map(name, i, 48, 32) for i in range(4)]
    assert all(one.shape == (32, 48, 3) and one.dtype == np.uint8 and one.max() > one.min() for one in maps)
    assert all((one != other).any() for one, other in itertools.pairwise(maps))
    assert (control_map(name, 1, 48, 32) == maps[1]).all()


def test_pictures_survive_the_pipe():
    """Bit for bit, whatever the shape."""
    assert (decode(encode(image())) == image()).all()


def test_rounding_is_reported_and_more_is_refused():
    """A level here or there is a row; eleven levels in one pixel stop the benchmark and name the image."""
    (workload,) = workloads(["single"])
    near, far = image(), image()
    near[0, 0, 0] += 2
    far[1, 1, 1] += 11
    same = encode(image())
    (reported,) = check(workload, {"plait": [same, encode(near)], "diffusers": [same, same]})
    assert (reported.system, reported.metric, reported.value, reported.n) == (
        "plait",
        "largest_pixel_difference",
        2.0,
        2,
    )
    with pytest.raises(Disagreement, match="image 1 of plait differs from diffusers's by 11 levels"):
        check(workload, {"plait": [same, encode(far)], "diffusers": [same, same]})


def test_flat_pictures_prove_nothing():
    """Two systems that both draw black do not agree, they fail."""
    black = encode(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(Disagreement, match="flat"):
        check(workloads(["single"])[0], {"plait": [black], "diffusers": [black]})


def test_missing_models_are_listed(tmp_path):
    """The message names every file that a workload needs."""
    with pytest.raises(
        BenchError, match=r"emoji/model_index.json, loras/noto.safetensors, controlnets/edges/config.json"
    ):
        open_models(tmp_path, controlnets=frozenset({"edges"}), loras=frozenset({"noto"}))


def test_only_the_models_that_are_needed_must_be_there(tmp_path):
    """`single` runs in a folder without ControlNets and LoRAs; unknown names are errors."""
    (tmp_path / "emoji").mkdir()
    (tmp_path / "emoji" / "model_index.json").write_text("{}")
    benchmark = definition(tmp_path, only=["single"], systems=["plait", "diffusers"])
    assert [system.name for system in benchmark.systems] == ["plait", "diffusers"]
    with pytest.raises(BenchError, match="no system 'comfy'"):
        definition(tmp_path, only=["single"], systems=["comfy"])
    with pytest.raises(BenchError, match="loras"):
        definition(tmp_path, only=["lora"])
