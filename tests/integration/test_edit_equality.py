"""Edits against diffusers' Img2Img and Inpaint pipelines: same seed, same latents, alone and in company.

Tiny random SD and SDXL models, ControlNets and LoRAs, and a UNet for inpainting with nine channels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from plait_serving.diffusion.values import ControlRef, Edit, LoraRef, Scheduler
from support.closeness import EQUAL, IN_COMPANY, ulps
from support.denoise import EDITS, IMAGE, MASK, control_image
from support.rig import ask as any_request
from support.rig import rig_of, sd, sdxl
from support.tiny import tiny_controlnet, tiny_sd

__all__ = ["rig_of", "sd", "sdxl"]

IMG2IMG, INPAINT, ANEW = EDITS.values()
CONTROL = ControlRef(name="a", image=control_image(1), scale=0.8, start=0.0, end=0.7)
LORA = LoraRef(name="one", scale=0.9)
ask = partial(any_request, steps=6, scheduler=Scheduler.EULER_A)


@pytest.fixture(scope="module")
def nine(rig_of, tmp_path_factory, tiny_sd_folder):
    """A tiny Stable Diffusion for inpainting, with a ControlNet of the ordinary kind."""
    root = tmp_path_factory.mktemp("nine")
    folder = tiny_sd(root / "sd", seed=4, in_channels=9)
    return rig_of(folder, {"a": tiny_controlnet(root / "control", tiny_sd_folder, seed=3)})


@pytest.mark.parametrize("scheduler", Scheduler)
def test_every_sampler_equals_diffusers(sd, scheduler):
    """Every sampler starts in the middle and blends as in diffusers' pipelines, the random ones with its draws."""
    probe, reference = sd
    asked = ask(11, edit=INPAINT, scheduler=scheduler)
    (ours,) = probe.latents(asked)
    assert ulps(ours, reference(asked)) <= EQUAL


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("model", ["sd", "sdxl"])
def test_edits_with_controlnet_and_lora_equal_diffusers(model, edit, request):
    """Two images with a ControlNet and a LoRA; and each ingredient really changed them."""
    probe, reference = request.getfixturevalue(model)
    asked = ask(21, edit=edit, n=2, controlnets=(CONTROL,), loras=(LORA,))
    (ours,) = probe.latents(asked)
    assert ulps(ours, reference(asked)) <= EQUAL
    other_image = replace(edit, image=control_image(6))
    for other in (replace(asked, controlnets=()), replace(asked, loras=()), replace(asked, edit=other_image)):
        (others,) = probe.latents(other)
        assert (others - ours).abs().max() > 1e-2


@pytest.mark.parametrize("model", ["sd", "sdxl"])
def test_edits_in_company_equal_diffusers(model, request):
    """A generation and three edits at different steps share every call, and each is diffusers' own."""
    probe, reference = request.getfixturevalue(model)
    asked = [
        ask(31, edit=IMG2IMG), ask(32, edit=INPAINT, prompt="green tree", steps=8, controlnets=(CONTROL,)),
        ask(33, edit=ANEW, prompt="dog", scheduler=Scheduler.DPMPP_2M), ask(34, prompt="house"),
    ]  # fmt: skip
    ours = probe.latents(*asked)
    assert max(probe.batches) == len(asked)
    for one, latents in zip(asked, ours, strict=True):
        assert ulps(latents, reference(one)) <= IN_COMPANY


def test_strength_1_without_a_mask_is_img2img_at_strength_1(sd):
    """It adds noise to the image, as diffusers does, and is no generation."""
    probe, reference = sd
    asked = ask(41, edit=Edit(image=IMAGE, strength=1.0))
    (ours,) = probe.latents(asked)
    assert ulps(ours, reference(asked)) <= EQUAL
    (generated,) = probe.latents(replace(asked, edit=None))
    assert (generated - ours).abs().max() > 1e-3


@pytest.mark.parametrize("edit", [INPAINT, ANEW], ids=["inpaint", "anew"])
@pytest.mark.parametrize("controlnets", [(), (CONTROL,)], ids=["plain", "controlnet"])
def test_a_unet_of_nine_channels_equals_diffusers(nine, edit, controlnets):
    """Mask and masked image go in as channels, nothing is blended; the ControlNet sees the latents only."""
    probe, reference = nine
    asked = ask(51, edit=edit, n=2, controlnets=controlnets)
    (ours,) = probe.latents(asked)
    assert ulps(ours, reference(asked)) <= EQUAL


def test_a_unet_of_nine_channels_makes_all_of_an_image_without_a_mask(nine):
    """Generations and edits without a mask are diffusers' with a mask of everything, and share its calls."""
    probe, reference = nine
    everything = np.full_like(MASK, 255)
    asked = [ask(61), ask(62, edit=IMG2IMG), ask(63, edit=INPAINT, steps=5)]
    ours = probe.latents(*asked)
    assert max(probe.batches) == len(asked)
    masked = [Edit(image=IMAGE, mask=everything, strength=1.0), replace(IMG2IMG, mask=everything), INPAINT]
    for one, edit, latents in zip(asked, masked, ours, strict=True):
        assert ulps(latents, reference(replace(one, edit=edit))) <= IN_COMPANY
