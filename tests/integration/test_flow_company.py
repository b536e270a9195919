"""Stable Diffusion 3 and FLUX.1 in company: requests that differ in nearly everything share calls, and each is the
image of its own pipeline call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait_serving.diffusion.families.flux import denoiser as flux
from plait_serving.diffusion.values import Edit, ImageRequest, LoraRef, Scheduler, Sigmas
from support.closeness import EQUAL, IN_COMPANY, ulps
from support.denoise import control_image
from support.flow_rig import FlowRig, flow_rig
from support.tiny import IMAGE_SIZE

__all__ = ["flow_rig"]

SETS = (
    (), (LoraRef(name="one", scale=0.9),), (LoraRef(name="two", scale=-0.6),), (LoraRef(name="one", scale=-0.4),),
    (LoraRef(name="text", scale=0.7),), (LoraRef(name="two", scale=0.5), LoraRef(name="one", scale=0.5)),
)  # fmt: skip
SPACINGS = (None, Sigmas.KARRAS, Sigmas.BETA, Sigmas.EXPONENTIAL)
LENGTHS = (16, 24)
PROMPTS = ("a red cat", "the house and a tree", "photo with the green face", "blue apple", "dog")
GUIDANCE = {
    "sd3": ({"guidance_scale": 4.0, "negative_prompt": "dog"}, {"guidance_scale": 1.0}, {"guidance_scale": 7.0}),
    "dev": (
        {"guidance_scale": 3.5}, {"guidance_scale": 1.5, "true_cfg_scale": 3.0, "negative_prompt": "blue tree"},
        {"guidance_scale": 6.0},
    ),
}  # fmt: skip
OTHERS = {"sd3": (Scheduler.HEUN, Scheduler.UNIPC, Scheduler.DPMPP_2M), "dev": (Scheduler.UNIPC, Scheduler.DPMPP_2M)}
IMAGE = control_image(3, IMAGE_SIZE)


def twelve(rig: FlowRig) -> list[ImageRequest]:
    """Requests of 4 to 7 steps that differ in steps, guidance, samplers, sigmas, seeds, LoRA sets and text lengths."""
    found = []
    for i in range(12):
        others = OTHERS[rig.name]
        other = others[i // 4 % len(others)] if i % 4 == 3 else None
        sampling = {"scheduler": other} if other else {"sigmas": SPACINGS[i // 2 % 4]}
        more = {**GUIDANCE[rig.name][i // 3 % 3], **sampling, "prompt": PROMPTS[i % 5], "steps": 4 + i % 4}
        found.append(rig.ask(100 + i, loras=SETS[i % 6], max_sequence_length=LENGTHS[i // 6], **more))
    return found


def apart(ours: np.ndarray, theirs: np.ndarray) -> int:
    """By how many levels of 255 two images differ at most."""
    return int(np.abs(ours.astype(int) - theirs.astype(int)).max())


def pipeline_image(rig: FlowRig, request: ImageRequest) -> np.ndarray:
    """``uint8 (H, W, 3)`` of the request's own pipeline call."""
    return (rig.reference.image(request)[0] * 255).round().permute(1, 2, 0).byte().numpy()


@pytest.mark.parametrize("model", ["sd3", "dev"])
def test_twelve_that_differ_share_calls_and_are_their_pipelines(flow_rig, model):
    """Each is its pipeline's image to one level and no other's; together they take at most a third of the calls that
    they take alone."""
    rig = flow_rig(model)
    requests = twelve(rig)
    switches = rig.probe.engine.statistics().lora_switches
    ours = rig.images(*requests)
    together, rows = len(rig.probe.batches), max(rig.probe.batches)
    theirs = [pipeline_image(rig, one) for one in requests]
    assert max(apart(a, b) for a, b in zip(ours, theirs, strict=True)) <= 1
    assert all(apart(a, b) > 1 for i, a in enumerate(ours) for j, b in enumerate(theirs) if i != j)
    alone = 0
    for one in requests:
        rig.probe.latents(one)
        alone += len(rig.probe.batches)
    assert 3 * together <= alone
    assert rows > 4
    assert rig.probe.engine.statistics().lora_switches == switches


@pytest.mark.parametrize("model", ["sd3", "dev", "schnell"])
def test_edits_share_calls_with_generations(flow_rig, model):
    """From an image, inside masks, with another strength each, with LoRA sets and without."""
    rig, mask = flow_rig(model), np.zeros((IMAGE_SIZE, IMAGE_SIZE), np.uint8)
    mask[4:20, 6:30] = 255
    edits = (
        None, Edit(image=IMAGE, strength=0.7), Edit(image=IMAGE, mask=mask, strength=0.5),
        Edit(image=IMAGE, mask=255 - mask, strength=1.0), Edit(image=IMAGE[::-1].copy(), strength=0.9),
    )  # fmt: skip
    requests = [
        rig.ask(200 + i, edit=edit, steps=6 + i, loras=SETS[i], prompt=PROMPTS[i]) for i, edit in enumerate(edits)
    ]
    ours = rig.probe.latents(*requests)
    assert max(rig.probe.batches) == len(requests)
    for one, latents in zip(requests, ours, strict=True):
        assert ulps(latents, rig.reference.latents(one)) <= IN_COMPANY


@pytest.mark.parametrize("model", ["sd3", "dev"])
def test_what_cannot_be_an_input_is_merged_beside_others(flow_rig, model):
    """A DoRA has calls of its own, on weights that are the model's again for the others."""
    rig = flow_rig(model)
    sets = ((LoraRef(name="dora", scale=1.0),), SETS[1], ())
    requests = [rig.ask(400 + i, loras=loras) for i, loras in enumerate(sets)]
    rig.probe.latents(*requests)  # their files are in memory from here on: all can begin together
    ours = rig.probe.latents(*requests)
    assert max(rig.probe.batches) == 2
    for one, latents in zip(requests, ours, strict=True):
        assert ulps(latents, rig.reference.latents(one)) <= IN_COMPANY
    assert ulps(rig.probe.latents(requests[2])[0], rig.reference.latents(requests[2])) <= EQUAL


def test_references_of_one_size_share_calls(flow_rig, monkeypatch):
    """Different images, guidance and LoRA sets; a request without a reference has calls of its own."""
    from diffusers.pipelines.flux import pipeline_flux_kontext

    for module, name in ((flux, "KONTEXT_SIZES"), (pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS")):
        monkeypatch.setattr(module, name, [(48, 48)])
    rig = flow_rig("kontext")
    images = [control_image(i, side) for i, side in enumerate((40, 64, 32))]
    requests = [
        rig.ask(300 + i, reference=image, loras=SETS[i], guidance_scale=2.0 + i) for i, image in enumerate(images)
    ]
    requests[1] = replace(requests[1], true_cfg_scale=3.0, negative_prompt="blue")
    requests.append(rig.ask(310))
    ours = rig.probe.latents(*requests)
    assert sorted(rig.probe.batches) == [1] * 4 + [3] * 4
    for one, latents in zip(requests, ours, strict=True):
        assert ulps(latents, rig.reference.latents(one)) <= IN_COMPANY
