"""The image benchmark's own parts that need no model: orders, control maps, comparing images, the models' folder."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from plait_bench.errors import BenchError, Disagreement
from plait_bench.fleet.values import ProcessLayout, RunSample
from plait_bench.fleet.workers import WorkerFleet
from plait_bench.images import benchmark, definition, measures
from plait_bench.images.drawings import control_map
from plait_bench.images.models import open_models
from plait_bench.images.pixels import PixelCheck, decode, encode
from plait_bench.images.roster import taking_part
from plait_bench.images.sizes import SIZES, Variety, size_of
from plait_bench.images.workloads import DISTINCT, ImageSpec, distinct_sets, workloads

SD15 = Variety(size=SIZES["sd15"])


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
    assert [workload.name for workload in workloads()] == [
        "single", "controlnet", "controlnet-service", "lora", "same4", "same16", "mixed4", "mixed16", "distinct16",
    ]  # fmt: skip
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
    (reported,) = PixelCheck()(workload, {"plait": [same, encode(near)], "diffusers": [same, same]})
    assert (reported.system, reported.metric, reported.value, reported.n) == (
        "plait",
        "largest_pixel_difference",
        2.0,
        2,
    )
    with pytest.raises(Disagreement, match="image 1 of plait differs from diffusers's by 11 levels"):
        PixelCheck()(workload, {"plait": [same, encode(far)], "diffusers": [same, same]})


def test_flat_pictures_prove_nothing():
    """Two systems that both draw black do not agree, they fail."""
    black = encode(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(Disagreement, match="flat"):
        PixelCheck()(workloads(["single"])[0], {"plait": [black], "diffusers": [black]})


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
    defined = definition(tmp_path, only=["single"], named=["plait", "diffusers"])
    assert [system.name for system in defined.systems] == ["plait", "diffusers"]
    with pytest.raises(BenchError, match="no system 'comfy'"):
        benchmark(tmp_path, only=["single"], named=["comfy"], cores=2, open_fleet=WorkerFleet)
    with pytest.raises(BenchError, match="no workload 'same16'"):
        benchmark(tmp_path, only=["same16"], varieties=[SD15], cores=2, open_fleet=WorkerFleet)
    with pytest.raises(BenchError, match="loras"):
        definition(tmp_path, only=["lora"])


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_sizes_edges_and_dtypes_never_share_a_row():
    """What differs in the models, the image size or the dtype has another name."""
    kinds = [
        Variety(size=size, edge=edge, dtype=dtype)
        for size in SIZES.values()
        for edge in ((256, 512) if size.has_edge else (256,))
        for dtype in ("float32", "bfloat16")
    ]
    names = [kind.row_name("single") for kind in kinds]
    assert len(set(names)) == len(names)
    assert {"single", "bf16-single", "sd15-single", "sd15-512-single", "sdxl-bf16-single"} < set(names)
    for kind in kinds:
        assert all(workload.name == kind.row_name(name) for workload, name in _named(kind))


def _named(kind):
    names = [name for name in kind.size.workloads if name != "start"]
    return zip(workloads(names, kind), names, strict=True)


def test_models_of_real_size_draw_few_steps_at_the_edge_that_was_asked_for():
    """The starter's images keep the model's own size."""
    for workload in workloads(None, Variety(size=SIZES["sd15"], edge=512)):
        assert {(item["steps"], item["edge"]) for item in workload.items} == {(4, 512)}
        assert {item["steps"] for item in workload.warm_up} == {1}
    assert {item["edge"] for item in workloads(["single"])[0].items} == {None}
    with pytest.raises(BenchError, match="256, 512, 1024 pixels wide, not 384"):
        Variety(size=SIZES["sd15"], edge=384)
    with pytest.raises(BenchError, match="no size 'sd3'; there are starter, sd15, sdxl"):
        size_of("sd3")


def test_distinct_sets_are_distinct():
    """Sixteen LoRA sets of three LoRAs: no two requests can share merged weights."""
    sets = distinct_sets(SIZES["starter"].lora_names)
    assert len(set(sets)) == len(sets) == DISTINCT
    assert {len(loras) for loras in sets} == {1, 2, 3}
    (workload,) = workloads(["distinct16"])
    assert len({str(item["loras"]) for item in workload.items}) == DISTINCT


def test_four_at_once_are_plain_or_of_four_lora_sets():
    """At both sizes."""
    for kind in (Variety(), SD15):
        same, mixed = workloads(["same4", "mixed4"], kind)
        assert [item["loras"] for item in same.items] == [()] * 4
        assert len({str(item["loras"]) for item in mixed.items}) == 4
        assert not same.one_by_one
        assert not mixed.one_by_one


def test_our_default_takes_part_everywhere_and_leads():
    """Variants that a user would have to choose are systems with names of their own."""
    for size in SIZES.values():
        for workload in size.workloads:
            names = taking_part(workload, size)
            assert names[0] == "plait"
            assert len(names) > 1
    assert taking_part("single", SIZES["sd15"]) == (
        "plait", "plait_exact", "plait_torch", "diffusers_fair", "openvino",
    )  # fmt: skip
    assert taking_part("lora", SIZES["sd15"], ["plait", "openvino", "diffusers_batched"]) == ("plait",)
    assert taking_part("same4", SIZES["sd15"], ["plait_engine", "openvino"]) == ("plait_engine", "openvino")


def test_what_does_not_fit_in_memory_together_is_measured_in_pairs(tmp_path):
    """At sd15 ours stays open beside one peer after the other; the reference comes first."""
    defined = definition(tmp_path, varieties=[SD15], only=["single"])
    pairs = [sorted(workload.systems or ()) for workload in defined.workloads]
    assert defined.max_open == 2
    assert pairs == [
        ["diffusers_fair", "plait"], ["plait", "plait_exact"], ["plait", "plait_torch"], ["openvino", "plait"],
    ]  # fmt: skip
    assert {workload.name for workload in defined.workloads} == {"sd15-single"}


def test_a_workload_loads_only_the_models_that_it_names(tmp_path):
    """At real size a ControlNet that nobody asks for would cost gigabytes."""
    defined = definition(tmp_path, varieties=[SD15], only=["single", "controlnet", "lora"], named=["plait"])
    single, controlnet, lora = (workload.settings["models"] for workload in defined.workloads)
    assert (single["controlnets"], single["loras"]) == ({}, [])
    assert (controlnet["controlnets"], controlnet["loras"]) == ({"edges": "sd15-controlnet"}, [])
    assert (lora["controlnets"], lora["loras"]) == ({}, ["style1", "style2"])


def test_no_layout_of_a_big_model_leaves_cores_idle():
    """The starter tries one core, too."""
    offered = [ProcessLayout(processes=1, threads=1), ProcessLayout(processes=1, threads=2)]
    offered.append(ProcessLayout(processes=2, threads=1))
    assert [str(layout) for layout in SIZES["sd15"].layouts(offered)] == ["1x2", "2x1"]
    assert [str(layout) for layout in SIZES["sdxl"].layouts(offered)] == ["1x2"]
    assert len(SIZES["starter"].layouts(offered)) == 3


def test_a_later_pair_is_compared_with_the_first_ones_reference():
    """Two systems that agree with each other, but not with diffusers, are refused."""
    (workload,) = workloads(["single"])
    check, right, wrong = PixelCheck(), encode(image()), encode(image(1))
    check(workload, {"plait": [right], "diffusers_fair": [right]})
    assert [row.system for row in check(workload, {"plait": [right], "openvino": [right]})] == ["plait", "openvino"]
    with pytest.raises(Disagreement, match="openvino differs from diffusers_fair's"):
        check(workload, {"plait": [right], "openvino": [wrong]})


def test_bfloat16_is_judged_by_the_mean():
    """Rounding alone moves single pixels by tens of levels there."""
    (workload,) = workloads(["single"])
    half = replace(workload, settings={"dtype": "bfloat16"})
    far = image()
    far[1, 1, 1] += 40
    (row,) = PixelCheck()(half, {"plait": [encode(far)], "diffusers": [encode(image())]})
    assert (row.metric, row.value) == ("mean_pixel_difference", 40 / image().size)
