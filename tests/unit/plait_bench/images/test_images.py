"""The image benchmark's own parts that need no model: orders and how processes share them, control
maps, comparing images, the models' folder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_bench.errors import BenchError, Disagreement
from plait_bench.images import benchmark, evenly, in_runs, on_fleets
from plait_bench.images.measured import PixelCheck
from plait_bench.images.orders import SIZES, ImageSpec, cost, workload

STARTER, SD15 = SIZES["starter"], SIZES["sd15"]


def image(seed=0):
    """Any image."""
    return np.random.default_rng(seed).integers(0, 200, (4, 6, 3), dtype=np.uint8)


def test_each_order_of_lora_pays_its_switch():
    """No two neighbours have the same set, also from one round to the next."""
    sets = [order.loras for order in workload("lora", STARTER).items]
    assert all(one != sets[i - 1] for i, one in enumerate(sets))
    assert all(sets)


def test_a_warm_up_touches_what_its_workload_touches():
    """The same orders with fewer steps."""
    for made in (workload(name, STARTER) for name in STARTER.workloads[1:]):
        assert [replace(one, steps=0) for one in made.items] == [replace(one, steps=0) for one in made.warm_up]
        assert max(order.steps for order in made.warm_up) < 5


def test_rounding_is_fine_and_more_is_refused():
    """A level here or there; eleven levels in one pixel stop the benchmark and name the image."""
    single = workload("single", STARTER)
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
        PixelCheck()(workload("single", STARTER), {"plait": [black], "diffusers": [black]})


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
    (made,) = benchmark(only=["single"], systems=["plait", "diffusers"], **given)
    assert made.systems == ("plait", "diffusers")
    with pytest.raises(BenchError, match="no system 'comfy'"):
        benchmark(only=["single"], systems=["comfy"], **given)
    with pytest.raises(BenchError, match="no workload 'same16'"):
        benchmark(only=["same16"], size="sd15", **given)
    with pytest.raises(BenchError, match="loras"):
        benchmark(only=["lora"], **given)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_sizes_edges_and_dtypes_never_share_a_row():
    """What differs in the models, the image size or the dtype has another name."""
    kinds = [
        size.of(dtype, edge)
        for size in SIZES.values()
        for edge in ((256, 512) if size.name != "starter" else (256,))
        for dtype in ("float32", "bfloat16", "float16")
    ]
    names = [kind.row_name("single") for kind in kinds]
    assert len(set(names)) == len(names)
    assert {"single", "bf16-single", "sd15-single", "sd15-512-single", "sdxl-bf16-single"} < set(names)
    for kind in kinds:
        assert all(workload(name, kind).name == kind.row_name(name) for name in kind.workloads[1:])


def test_what_does_not_fit_in_memory_together_is_measured_in_pairs(tmp_path):
    """At sd15 ours stays open beside one peer after the other; the reference comes first."""
    made = on_fleets(tmp_path, [SD15], ["single"])
    assert [each.pairs for each in made] == [
        (("plait", peer),) for peer in ("diffusers_fair", "plait_exact", "plait_torch", "openvino")
    ]
    assert {(each.name, each._takes_turns) for each in made} == {("sd15-single", False)}


def test_on_a_gpu_the_engine_is_compared_with_diffusers(tmp_path):
    """All stay open, each in one process; the images have more steps, and nobody adapts to the load."""
    (made,) = benchmark(only=["lora"], size="sdxl", device="cuda", models=tmp_path)
    assert (made.name, made._takes_turns) == ("gpu-sdxl-fp16-lora", False)
    found = {name: [layout.partition(" ")[2] for layout in made.layouts(name)] for name in made.systems}
    assert found == {"plait_engine": ["own"], "diffusers_fair": ["channels_last", "compiled"], "diffusers": [""]}
    assert (made._items.settings["device"], made._items.settle_s) == ("cuda", 0.0)
    assert {order.steps for order in made._items.items} == {20}


def test_openvino_makes_equal_images_one_by_one_or_in_one_call(tmp_path):
    """Whichever is faster."""
    (made,) = on_fleets(tmp_path, [STARTER], ["same4"], ["openvino"], host_cores=2)
    assert list(made.layouts("openvino")) == [
        f"{of}{batched}" for of in ("1x1", "1x2", "2x1") for batched in ("", " batched")
    ]


def test_a_workload_loads_only_the_models_that_it_names(tmp_path):
    """At real size a ControlNet that nobody asks for would cost gigabytes."""
    made = on_fleets(tmp_path, [SD15], ["single", "controlnet", "lora"], ["plait"])
    single, controlnet, lora = (each._items.settings["models"] for each in made)
    assert (single.controlnets, single.loras) == ({}, {})
    assert (controlnet.controlnets, controlnet.loras) == ({"edges": tmp_path / "sd15-controlnet"}, {})
    assert (lora.controlnets, list(lora.loras)) == ({}, ["style1", "style2"])


def test_a_later_pair_is_compared_with_the_first_ones_reference():
    """Two systems that agree with each other, but not with diffusers, are refused."""
    single, check, right, wrong = workload("single", STARTER), PixelCheck(), image(), image(1)
    check(single, {"plait": [right], "diffusers_fair": [right]})
    with pytest.raises(Disagreement, match="openvino differs from diffusers_fair's"):
        check(single, {"plait": [right], "openvino": [wrong]})


def test_bfloat16_is_judged_by_the_mean():
    """Rounding alone moves single pixels by tens of levels there."""
    half = replace(workload("single", STARTER), settings={"dtype": "bfloat16"})
    far = image()
    far[1, 1, 1] += 40
    PixelCheck()(half, {"plait": [far], "diffusers": [image()]})
    with pytest.raises(Disagreement, match="by 9 levels"):
        PixelCheck()(half, {"plait": [image() + 9], "diffusers": [image()]})


# ---- how a workload is cut among processes --------------------------------------------------------------------------

orders = st.builds(
    ImageSpec,
    prompt=st.just("owl"),
    seed=st.just(0),
    steps=st.integers(1, 30),
    loras=st.integers(0, 4).map(lambda number: ((f"lora{number}", 1.0),)),
    control=st.sampled_from([None, ("edges", 0)]),
)
items = st.lists(orders, min_size=1, max_size=24)
WAYS = {"evenly": evenly, "in_runs": in_runs}


@given(items, st.integers(1, 4), st.sampled_from(sorted(WAYS)))
def test_every_item_goes_to_exactly_one_process(taken, processes, way):
    """Nothing is lost or done twice."""
    shares = WAYS[way](taken, processes)
    assert len(shares) == processes
    assert sorted(i for share in shares for i in share) == list(range(len(taken)))


@given(items, st.integers(1, 4))
def test_shares_differ_by_less_than_the_dearest_item(taken, processes):
    """Where items may be split freely."""
    loads = [sum(cost(taken[i]) for i in share) for share in evenly(taken, processes)]
    assert max(loads) - min(loads) <= max(map(cost, taken))


@given(items, st.integers(1, 4))
def test_runs_change_group_as_rarely_as_possible(taken, processes):
    """All processes together change group at most once per group, and once per cut."""
    changes = 0
    for share in in_runs(taken, processes):
        sets = [taken[i].loras for i in share]
        changes += sum(1 for i, one in enumerate(sets) if i == 0 or one != sets[i - 1])
    assert changes <= len({order.loras for order in taken}) + processes - 1
