"""The image benchmark's own parts that need no model: orders, control maps, comparing images, the models' folder."""

from __future__ import annotations

import itertools
from dataclasses import replace
from multiprocessing import Pipe

import numpy as np
import pytest

from plait_bench.benchmark import cores
from plait_bench.errors import BenchError, Disagreement
from plait_bench.images import benchmark, on_fleets, taking_part
from plait_bench.images.measured import PixelCheck
from plait_bench.images.orders import (
    DISTINCT,
    SIZES,
    Variety,
    control_map,
    distinct_sets,
    size_of,
    workload,
)

SD15 = Variety(size=SIZES["sd15"])


def workloads(names=None, variety=None):
    """All workloads with orders, or those named."""
    variety = variety or Variety()
    return [workload(name, variety) for name in names or variety.size.workloads if name != "start"]


def image(seed=0):
    """Any image."""
    return np.random.default_rng(seed).integers(0, 200, (4, 6, 3), dtype=np.uint8)


def test_orders_survive_the_pipe():
    """What is sent is what is drawn, in every workload."""
    here, there = Pipe()
    for made in workloads():
        here.send(made.items)
        assert there.recv() == made.items


def test_workloads_are_the_same_in_every_run():
    """Fixed seeds; an unknown name is an error."""
    assert workloads() == workloads()
    assert [made.name for made in workloads()] == [
        "single", "controlnet", "controlnet-service", "lora", "same4", "same16", "mixed4", "mixed16", "distinct16",
    ]  # fmt: skip
    with pytest.raises(KeyError):
        workloads(["triple"])


def test_each_order_of_lora_pays_its_switch():
    """No two neighbours have the same set, also from one round to the next."""
    sets = [order.loras for order in workload("lora").items]
    assert all(one != sets[i - 1] for i, one in enumerate(sets))
    assert all(sets)


def test_same16_agrees_in_everything_but_prompt_and_seed():
    """Otherwise the batched peer would draw something else."""
    made = workload("same16")
    rest = [replace(order, prompt="", seed=0) for order in made.items]
    assert len(rest) == 16
    assert all(one == rest[0] for one in rest)
    assert len({order.seed for order in made.items}) == 16


def test_a_warm_up_touches_what_its_workload_touches():
    """The same orders with fewer steps."""
    for made in workloads():
        assert [replace(one, steps=0) for one in made.items] == [replace(one, steps=0) for one in made.warm_up]
        assert max(order.steps for order in made.warm_up) < 5


@pytest.mark.parametrize("name", ["edges", "colors"])
def test_control_maps_are_pictures_of_something(name):
    """Of the size that was asked for, not flat, and different for neighbouring numbers."""
    maps = [control_map(name, i, 48) for i in range(4)]
    assert all(one.shape == (48, 48, 3) and one.dtype == np.uint8 and one.max() > one.min() for one in maps)
    assert all((one != other).any() for one, other in itertools.pairwise(maps))
    assert (control_map(name, 1, 48) == maps[1]).all()


def test_rounding_is_fine_and_more_is_refused():
    """A level here or there; eleven levels in one pixel stop the benchmark and name the image."""
    single = workload("single")
    near, far, same = image(), image(), image()
    near[0, 0, 0] += 8
    far[1, 1, 1] += 11
    PixelCheck()(single, {"plait": [same, near], "diffusers": [same, same]})
    with pytest.raises(Disagreement, match="image 1 of plait differs from diffusers's by 11 levels"):
        PixelCheck()(single, {"plait": [same, far], "diffusers": [same, same]})


def test_flat_pictures_prove_nothing():
    """Two systems that both draw black do not agree, they fail."""
    black = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(Disagreement, match="flat"):
        PixelCheck()(workload("single"), {"plait": [black], "diffusers": [black]})


def test_missing_models_are_listed(tmp_path):
    """The message names every file that a workload needs."""
    with pytest.raises(
        BenchError, match=r"emoji/model_index.json, loras/noto.safetensors, .*, controlnets/edges/config.json"
    ):
        benchmark(only=["mixed16"], models=tmp_path, dtype="float32")


def test_only_the_models_that_are_needed_must_be_there(tmp_path):
    """`single` runs in a folder without ControlNets and LoRAs; unknown names are errors."""
    (tmp_path / "emoji").mkdir()
    (tmp_path / "emoji" / "model_index.json").write_text("{}")
    given = {"models": tmp_path, "dtype": "float32"}
    (made,) = benchmark(only=["single"], systems=["plait", "diffusers"], **given).workloads
    assert made.systems == ("plait", "diffusers")
    with pytest.raises(BenchError, match="no system 'comfy'"):
        benchmark(only=["single"], systems=["comfy"], **given)
    with pytest.raises(BenchError, match="no workload 'same16'"):
        benchmark(only=["same16"], size="sd15", **given)
    with pytest.raises(BenchError, match="loras"):
        benchmark(only=["lora"], **given)


def parts(tmp_path, only, systems=()):
    """The lists of items of sd15, and how they are measured."""
    made = on_fleets(tmp_path, [SD15], only, systems).workloads
    return [workload._items for workload in made], made[0]._pool


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_sizes_edges_and_dtypes_never_share_a_row():
    """What differs in the models, the image size or the dtype has another name."""
    kinds = [
        Variety(size=size, edge=edge, dtype=dtype)
        for size in SIZES.values()
        for edge in ((256, 512) if size.name != "starter" else (256,))
        for dtype in ("float32", "bfloat16")
    ]
    names = [kind.row_name("single") for kind in kinds]
    assert len(set(names)) == len(names)
    assert {"single", "bf16-single", "sd15-single", "sd15-512-single", "sdxl-bf16-single"} < set(names)
    for kind in kinds:
        assert all(workload(name, kind).name == kind.row_name(name) for name in kind.size.workloads[1:])


def test_models_of_real_size_draw_few_steps_at_the_edge_that_was_asked_for():
    """The starter's images are of the size that its model was made for."""
    for made in workloads(None, Variety(size=SIZES["sd15"], edge=512)):
        assert {(order.steps, order.edge) for order in made.items} == {(4, 512)}
        assert {order.steps for order in made.warm_up} == {1}
    assert {order.edge for order in workload("single").items} == {64}
    with pytest.raises(BenchError, match="256, 512, 1024 pixels wide, not 384"):
        Variety(size=SIZES["sd15"], edge=384)
    with pytest.raises(BenchError, match="no size 'sd3'; there are starter, sd15, sdxl, sd35m"):
        size_of("sd3")


def test_distinct_sets_are_distinct():
    """Sixteen LoRA sets of three LoRAs: no two requests can share merged weights."""
    sets = distinct_sets(SIZES["starter"].lora_names)
    assert len(set(sets)) == len(sets) == DISTINCT
    assert {len(loras) for loras in sets} == {1, 2, 3}
    assert len({order.loras for order in workload("distinct16").items}) == DISTINCT


def test_four_at_once_are_plain_or_of_four_lora_sets():
    """At both sizes."""
    for kind in (Variety(), SD15):
        same, mixed = workloads(["same4", "mixed4"], kind)
        assert [order.loras for order in same.items] == [()] * 4
        assert len({order.loras for order in mixed.items}) == 4
        assert not same.one_by_one
        assert not mixed.one_by_one


def test_our_default_takes_part_everywhere_and_leads():
    """Variants that a user would have to choose are systems with names of their own."""
    for size in SIZES.values():
        for name in size.workloads:
            names = taking_part(name, size)
            assert names[0] == "plait"
            assert len(names) > 1
    assert taking_part("single", SIZES["sd15"]) == (
        "plait", "plait_exact", "plait_torch", "diffusers_fair", "openvino",
    )  # fmt: skip
    assert taking_part("lora", SIZES["sd15"], ["plait", "openvino", "diffusers_batched"]) == ("plait",)
    assert taking_part("same4", SIZES["sd15"], ["plait_engine", "openvino"]) == ("plait_engine", "openvino")


@pytest.mark.parametrize(("native", "dtype", "edge"), [(True, "bf16-", "512-"), (False, "", "")])
def test_a_transformer_is_measured_in_the_dtype_that_pays(native, dtype, edge, monkeypatch, tmp_path):
    """At the size that then takes a minute; with the systems that differ there, of which the pipelines are tried
    compiled, too."""
    monkeypatch.setattr("plait_kernels.cores.has_bfloat16", lambda: native)
    made = benchmark(models=tmp_path, size="sd35m").workloads
    names = ["start", "single", "same4", "mixed4"]
    assert list(dict.fromkeys(each.name for each in made)) == [f"sd35m-{edge}{dtype}{name}" for name in names]
    assert [each.systems for each in made] == [
        ("plait", "diffusers"), ("plait", "diffusers_fair"),
        ("plait", "diffusers_fair", "diffusers_batched"), ("plait", "diffusers_fair"),
    ]  # fmt: skip
    assert made[1].layouts("diffusers_fair") == [f"1x{cores()}", f"1x{cores()} compiled"]
    assert {order.scheduler for order in workload("single", Variety(size=SIZES["sd35m"])).items} == {"euler"}


def test_what_does_not_fit_in_memory_together_is_measured_in_pairs(tmp_path):
    """At sd15 ours stays open beside one peer after the other; the reference comes first."""
    made, pool = parts(tmp_path, ["single"])
    pairs = [sorted(items.systems) for items in made]
    assert pool._max_open == 2
    assert pairs == [
        ["diffusers_fair", "plait"], ["plait", "plait_exact"], ["plait", "plait_torch"], ["openvino", "plait"],
    ]  # fmt: skip
    assert {items.name for items in made} == {"sd15-single"}


def test_a_workload_loads_only_the_models_that_it_names(tmp_path):
    """At real size a ControlNet that nobody asks for would cost gigabytes."""
    made, _ = parts(tmp_path, ["single", "controlnet", "lora"], ["plait"])
    single, controlnet, lora = (items.settings["models"] for items in made)
    assert (single.controlnets, single.loras) == ({}, {})
    assert (controlnet.controlnets, controlnet.loras) == ({"edges": tmp_path / "sd15-controlnet"}, {})
    assert (lora.controlnets, list(lora.loras)) == ({}, ["style1", "style2"])


def test_no_layout_of_a_big_model_leaves_cores_idle():
    """The starter tries one core, too."""
    assert [str(layout) for layout in workload("same4", SD15).layouts(2)] == ["1x2", "2x1"]
    assert [str(layout) for layout in workload("single", Variety(size=SIZES["sdxl"])).layouts(2)] == ["1x2"]
    assert len(workload("same4").layouts(2)) == 3
    assert [str(layout) for layout in workload("same4", replace(SD15, device="cuda")).layouts(4)] == ["1x4"]


def test_a_later_pair_is_compared_with_the_first_ones_reference():
    """Two systems that agree with each other, but not with diffusers, are refused."""
    single = workload("single")
    check, right, wrong = PixelCheck(), image(), image(1)
    check(single, {"plait": [right], "diffusers_fair": [right]})
    check(single, {"plait": [right], "openvino": [right]})
    with pytest.raises(Disagreement, match="openvino differs from diffusers_fair's"):
        check(single, {"plait": [right], "openvino": [wrong]})


def test_bfloat16_is_judged_by_the_mean():
    """Rounding alone moves single pixels by tens of levels there."""
    half = replace(workload("single"), settings={"dtype": "bfloat16"})
    far = image()
    far[1, 1, 1] += 40
    PixelCheck()(half, {"plait": [far], "diffusers": [image()]})
    with pytest.raises(Disagreement, match="by 9 levels"):
        PixelCheck()(half, {"plait": [image() + 9], "diffusers": [image()]})
