"""Samplers and their options against diffusers' pipelines: same seed, same latents, alone and in company.

Tiny random SD and SDXL models with a ControlNet and a LoRA. `test_edit_equality` has every sampler in edits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.unet.samplers import SPACED as SPACING
from plait_serving.diffusion.values import ControlRef, Edit, LoraRef, Scheduler, Sigmas
from support.closeness import EQUAL, IN_COMPANY, ulps
from support.denoise import control_image
from support.rig import ask, rig_of, sd, sdxl
from support.tiny import IMAGE_SIZE

__all__ = ["rig_of", "sd", "sdxl"]

CONTROL = ControlRef(name="a", image=control_image(1, IMAGE_SIZE), scale=0.8, start=0.2, end=0.7)
LORA = LoraRef(name="one", scale=0.9)
IMG2IMG = Edit(image=control_image(5, IMAGE_SIZE), strength=0.6)
SPACED = [(scheduler, sigmas) for scheduler in SPACING for sigmas in Sigmas]
TINY_LAYERS = 3


@pytest.mark.parametrize("scheduler", Scheduler)
def test_every_sampler_equals_diffusers(sd, scheduler):
    """Two images with guidance, a ControlNet that acts in some calls, and a LoRA."""
    probe, reference = sd
    asked = ask(11, scheduler=scheduler, n=2, controlnets=(CONTROL,), loras=(LORA,))
    (ours,) = probe.latents(asked)
    assert ulps(ours, reference(asked)) <= EQUAL


@pytest.mark.parametrize(("scheduler", "sigmas"), SPACED)
def test_every_spacing_equals_diffusers(sd, scheduler, sigmas):
    """Noise levels by each formula, whole and, by one, from the middle of the schedule; it changes the picture."""
    probe, reference = sd
    plain = probe.latents(ask(21, scheduler=scheduler, sigmas=Sigmas.NORMAL))[0]
    for edit in (None, IMG2IMG) if sigmas is Sigmas.KARRAS else (None,):
        asked = ask(21, scheduler=scheduler, sigmas=sigmas, edit=edit)
        (ours,) = probe.latents(asked)
        assert ulps(ours, reference(asked)) <= EQUAL
        assert (sigmas is Sigmas.NORMAL) == (ulps(plain, ours) <= EQUAL)


@pytest.mark.parametrize("model", ["sd", "sdxl"])
def test_samplers_share_calls_and_equal_diffusers(model, request):
    """Every sampler and an edit in one batch, at other steps: who shares a call does not depend on the sampler."""
    probe, reference = request.getfixturevalue(model)
    asked = [
        ask(41 + i, scheduler=scheduler, steps=4 + i % 3, controlnets=(CONTROL,) if i % 2 else ())
        for i, scheduler in enumerate(Scheduler)
    ]
    asked.append(ask(60, scheduler=Scheduler.HEUN, sigmas=Sigmas.KARRAS, edit=IMG2IMG))
    asked.append(ask(61, scheduler=Scheduler.DDIM, eta=0.5))
    ours = probe.latents(*asked)
    assert max(probe.batches) == len(asked)
    for one, latents in zip(asked, ours, strict=True):
        assert ulps(latents, reference(one)) <= IN_COMPANY, one.scheduler


@pytest.mark.parametrize("model", ["sd", "sdxl"])
def test_guidance_rescale_and_clip_skip_equal_diffusers(model, request):
    """Both options, alone and together, of two images; and each changes the picture."""
    probe, reference = request.getfixturevalue(model)
    (plain,) = probe.latents(ask(51, n=2))
    for options in ({"guidance_rescale": 0.7}, {"clip_skip": 1}, {"clip_skip": 1, "guidance_rescale": 1.0}):
        asked = ask(51, n=2, **options)
        (ours,) = probe.latents(asked)
        assert ulps(ours, reference(asked)) <= EQUAL
        assert (ours - plain).abs().max() > 1e-3


def test_options_in_company_and_in_edits_equal_diffusers(sdxl):
    """A batch whose requests differ in every option, with an edit and a ControlNet among them."""
    probe, reference = sdxl
    asked = [
        ask(71, guidance_rescale=0.5, edit=IMG2IMG), ask(72, clip_skip=1, controlnets=(CONTROL,)),
        ask(73, guidance_rescale=0.9, scheduler=Scheduler.DPMPP_2M, sigmas=Sigmas.KARRAS), ask(74),
    ]  # fmt: skip
    ours = probe.latents(*asked)
    assert max(probe.batches) == len(asked)
    for one, latents in zip(asked, ours, strict=True):
        assert ulps(latents, reference(one)) <= IN_COMPANY


def test_the_layers_that_can_be_left_out_end(sd, sdxl):
    """All that there are can be; one more is refused by name."""
    for (probe, reference), layers in ((sd, TINY_LAYERS), (sdxl, TINY_LAYERS - 1)):
        (ours,) = probe.latents(ask(81, clip_skip=layers))
        assert ulps(ours, reference(ask(81, clip_skip=layers))) <= EQUAL
        with pytest.raises(RequestError, match=f"at most {layers} layers") as caught:
            probe.engine.submit(ask(81, clip_skip=layers + 1), lambda _: None)
        assert caught.value.param == "clip_skip"


def test_second_prompts_and_sizes_equal_diffusers(sdxl):
    """SDXL's own arguments, in a generation, with a ControlNet and in an edit, in company; and they matter. Negative
    prompts may be left out, both or either."""
    probe, reference = sdxl
    own = {"prompt_2": "green tree", "negative_prompt_2": "dog", "original_size": (1024, 768),
           "target_size": (512, 640), "crop": (30, 5)}  # fmt: skip
    asked = [ask(85, **own), ask(86, controlnets=(CONTROL,), **own), ask(87, edit=IMG2IMG, **own)]
    asked += [replace(one, negative_prompt=None) for one in asked[:2]] + [replace(asked[2], negative_prompt_2=None)]
    asked += [replace(asked[0], negative_prompt=None, negative_prompt_2=None)]
    asked = [replace(one, request_id=str(i)) for i, one in enumerate(asked)]
    ours = probe.latents(*asked)
    for one, latents in zip(asked, ours, strict=True):
        assert ulps(latents, reference(one)) <= IN_COMPANY
    for name in own:
        (less,) = probe.latents(replace(asked[0], **{name: (0, 0) if name == "crop" else None}))
        assert (less - ours[0]).abs().max() > 1e-4, name
