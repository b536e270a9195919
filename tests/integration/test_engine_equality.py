"""The whole engine against diffusers' pipelines: same seed, same latents, alone and in company.

A tiny random SDXL with two ControlNets and two LoRAs (zero convolutions randomised, or nothing would be proved), and
the starter models. diffusers' LoRAs are fused, as ours are: unfused branches round differently.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from plait_serving.diffusion.decoding import to_rgb
from plait_serving.diffusion.values import ControlRef, LoraRef, Scheduler
from plait_serving.images.config import STARTER_FOLDER
from support.closeness import EQUAL, IN_COMPANY, ulps
from support.denoise import control_image, max_difference
from support.rig import ask as any_request
from support.rig import rig_of, sd, sdxl
from support.tiny import tiny_sd

__all__ = ["rig_of", "sd", "sdxl"]

ask = partial(any_request, steps=4, scheduler=Scheduler.DPMPP_2M)
BOTH_CONTROLS = (
    ControlRef(name="a", image=control_image(1), scale=0.8, start=0.0, end=0.6),
    ControlRef(name="b", image=control_image(2), scale=0.5, start=0.25, end=1.0),
)
BOTH_LORAS = (LoraRef(name="one", scale=0.9), LoraRef(name="two", scale=-0.6))


def test_sdxl_with_two_controlnets_and_two_loras_equals_diffusers(sdxl):
    """One request with everything: equal latents; and each ingredient really changed the image."""
    probe, reference = sdxl
    asked = ask(11, n=2, controlnets=BOTH_CONTROLS, loras=BOTH_LORAS)
    (ours,) = probe.latents(asked)
    assert ulps(ours, reference(asked)) <= EQUAL
    for less in (replace(asked, controlnets=BOTH_CONTROLS[:1]), replace(asked, loras=BOTH_LORAS[:1])):
        (other,) = probe.latents(less)
        assert (other - ours).abs().max() > 1e-2


def test_sdxl_in_company_equals_diffusers(sdxl):
    """Batched with requests at other steps, prompts, ControlNets and seeds: other batch sizes move bits only."""
    probe, reference = sdxl
    asked = ask(21, controlnets=BOTH_CONTROLS, loras=BOTH_LORAS, scheduler=Scheduler.DPMPP_2M)
    company = [
        ask(22, prompt="green tree", steps=7, loras=BOTH_LORAS),
        ask(23, prompt="dog", steps=3, loras=BOTH_LORAS, controlnets=BOTH_CONTROLS[1:]),
        ask(24, prompt="house", steps=5),
    ]
    ours = probe.latents(asked, *company)[0]
    assert ulps(ours, reference(asked)) <= IN_COMPANY


@pytest.mark.parametrize("model", ["sd", "sdxl"])
def test_without_guidance_and_of_another_size_equals_diffusers(model, request):
    """Two images of one branch, and one that is no square; each with a ControlNet."""
    probe, reference = request.getfixturevalue(model)
    for more in ({"guidance_scale": 1.0, "n": 2}, {"height": 40, "width": 56}):
        asked = ask(35, controlnets=BOTH_CONTROLS[:1], **more)
        (ours,) = probe.latents(asked)
        assert ulps(ours, reference(asked)) <= EQUAL


def test_a_guidance_distilled_unet_equals_diffusers(rig_of, tmp_path):
    """A UNet that takes the guidance scale as an input (LCM) runs once per image, with diffusers' embedding."""
    probe, reference = rig_of(tiny_sd(tmp_path / "lcm", time_cond_proj_dim=9), {})
    asked = [
        ask(i, scheduler=Scheduler.LCM, guidance_scale=g, negative_prompt=None, n=2, steps=2)
        for i, g in enumerate((1.5, 8.0))
    ]
    theirs = [reference(one) for one in asked]
    assert max(ulps(probe.latents(one)[0], other) for one, other in zip(asked, theirs, strict=True)) <= EQUAL
    assert max(map(ulps, probe.latents(*asked), theirs)) <= IN_COMPANY
    assert max_difference(theirs[0], theirs[1]) > 1.0


def test_bfloat16_is_no_worse_than_diffusers(sd, rig_of, tiny_sd_folder, tiny_sd_controlnets):
    """In bf16 our error against fp32 is at most a fifth above diffusers' own bf16 error."""
    probe, reference = rig_of(tiny_sd_folder, {"a": tiny_sd_controlnets[0]}, dtype="bfloat16")
    asked = ask(45, n=2, controlnets=BOTH_CONTROLS[:1])
    truth = sd[1](asked)

    def error(latents: torch.Tensor) -> float:
        return float((latents.float() - truth).square().mean().sqrt())

    theirs = error(reference(asked))
    assert 0 < error(probe.latents(asked)[0]) <= theirs * 1.2
    assert error(probe.latents(asked, ask(99, scheduler=Scheduler.EULER))[0]) <= theirs * 1.2


@pytest.fixture(scope="module")
def starter(rig_of):
    """The starter models."""
    nets = {name: STARTER_FOLDER / "controlnets" / name for name in ("edges", "colors")}
    return rig_of(STARTER_FOLDER / "emoji", nets, STARTER_FOLDER / "loras")


@pytest.mark.parametrize(("lora", "net"), [("noto", "edges"), ("sketch", "colors"), ("pixel", None), (None, None)])
def test_starter_models_equal_diffusers(starter, lora, net):
    """The shipped base, ControlNets and LoRAs give diffusers' latents."""
    probe, reference = starter
    asked = ask(
        41, prompt="red apple", width=64, height=64,
        controlnets=(ControlRef(name=net, image=control_image(3, 64), scale=0.7),) if net else (),
        loras=(LoraRef(name=lora, scale=0.7),) if lora else (),
    )  # fmt: skip
    (ours,) = probe.latents(asked)
    assert ulps(ours, reference(asked)) <= EQUAL


def test_decoder_rounds_as_diffusers():
    """Half-way values round to even, as numpy's round in diffusers' image processor does."""
    values = torch.tensor([0.0, 0.5, 1.0, 127.5, 254.5]) / 255
    image = to_rgb(values.reshape(1, 1, 1, 5).expand(1, 3, 1, 5))[0]
    assert np.array_equal(image[0, :, 0], (values.numpy() * 255).round().astype("uint8"))
