"""What the warm-up runs: every code path, as little of it as is legal."""

from __future__ import annotations

from unittest.mock import Mock

from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.assemble import EngineSettings, build_engine, warm_up
from plait_serving.diffusion.errors import ControlNetUnavailable
from plait_serving.diffusion.families.unet.bundle import outline_bundle
from support.families import opened


def engine(folder, generate, controlnets):
    """An engine that hands its requests to `generate`."""
    return Mock(generate=generate, pool=Mock(first=Mock(family=opened(folder), controlnets=controlnets)))


def test_a_warm_up_runs_each_code_path_once_as_small_as_can_be(tiny_sd_folder):
    """One plain image and two with each ControlNet, which may have two places, of one step, at the size that the UNet
    still halves evenly."""
    requests = []
    it = engine(tiny_sd_folder, requests.append, {"edges": Mock(), "colors": Mock()})
    assert warm_up(it) >= 0
    assert [[ref.name for ref in request.controlnets] for request in requests] == [[], *[["edges"], ["colors"]] * 2]
    bundle = outline_bundle(tiny_sd_folder)
    edge = bundle.vae_factor * 2 ** (len(bundle.config["block_out_channels"]) - 1)
    edge = max(edge, bundle.size_multiple)
    assert {(request.width, request.height, request.steps) for request in requests} == {(edge, edge, 1)}
    assert {size.row.branches for size in map(it.pool.first.family.measure, requests)} == {2}


def test_a_controlnet_that_is_not_up_yet_does_not_stop_the_warm_up(tiny_sd_folder):
    """The others are warmed up all the same."""
    names = []

    def generate(request):
        names.extend(ref.name for ref in request.controlnets)
        if names[-1:] == ["edges"]:
            raise ControlNetUnavailable("not yet")

    warm_up(engine(tiny_sd_folder, generate, {"edges": Mock(), "colors": Mock()}))
    assert names == ["edges", "colors"] * 2


def test_a_warm_up_is_made_whatever_requests_may_ask_for(tiny_sd_folder, tiny_sd_controlnets):
    """Also where clients may use no ControlNet, short prompts only, or none of the sizes that a warm-up has."""
    limits = ImageLimits(sizes=("8x8",), max_edge_px=8, max_controlnets=0, max_prompt_tokens=1)
    nets = {"edges": tiny_sd_controlnets[0]}
    built = build_engine(EngineSettings(model=tiny_sd_folder, controlnets=nets, limits=limits, converts=False))
    try:
        assert warm_up(built) > 0
    finally:
        built.stop(drain_s=0)
