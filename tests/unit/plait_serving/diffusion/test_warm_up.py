"""What the warm-up runs: every code path, as little of it as is legal."""

from __future__ import annotations

from unittest.mock import Mock

from plait_serving.diffusion.assemble import Assembled
from plait_serving.diffusion.bundle import load_bundle
from plait_serving.diffusion.errors import ControlNetUnavailable
from plait_serving.diffusion.residents.roster import Roster


def assembled(folder, generate, controlnets):
    """An engine that hands its requests to `generate`."""
    model = Mock(outline=load_bundle(folder, outline=True), controlnets=controlnets)
    return Assembled(engine=Mock(generate=generate), roster=Roster({"tiny": model}))


def test_a_warm_up_runs_each_code_path_once_as_small_as_can_be(tiny_sd_folder):
    """One plain image and one with each ControlNet, of one step, at the size that the UNet still halves evenly."""
    requests = []
    it = assembled(tiny_sd_folder, requests.append, {"edges": Mock(), "colors": Mock()})
    assert it.warm_up() >= 0
    assert [[ref.name for ref in request.controlnets] for request in requests] == [[], ["edges"], ["colors"]]
    edge = it.first.outline.vae_factor * 2 ** (len(it.first.outline.config["block_out_channels"]) - 1)
    edge = max(edge, it.first.outline.size_multiple)
    assert {(request.width, request.height, request.steps) for request in requests} == {(edge, edge, 1)}
    assert {request.uses_cfg for request in requests} == {True}


def test_a_controlnet_that_is_not_up_yet_does_not_stop_the_warm_up(tiny_sd_folder):
    """The others are warmed up all the same."""
    names = []

    def generate(request):
        names.extend(ref.name for ref in request.controlnets)
        if names[-1:] == ["edges"]:
            raise ControlNetUnavailable("not yet")

    assembled(tiny_sd_folder, generate, {"edges": Mock(), "colors": Mock()}).warm_up()
    assert names == ["edges", "colors"]
