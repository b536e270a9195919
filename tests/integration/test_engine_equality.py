"""The whole engine against diffusers' pipelines: same seed, same latents, alone and in company.

A tiny random SDXL with two ControlNets and two LoRAs (zero convolutions randomised, or nothing would be proved), and
the starter models. diffusers' LoRAs are fused, as ours are: unfused branches round differently.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from plait_serving.diffusion.decoding import to_rgb
from plait_serving.diffusion.values import ControlRef, Failed, Finished, LoraRef, Progress, Scheduler, Tenant
from plait_serving.images.config import STARTER_FOLDER
from support.closeness import EQUAL, IN_COMPANY, ulps
from support.denoise import control_image
from support.rig import KNOBS, rig_of, sdxl
from support.rig import ask as any_request

__all__ = ["rig_of", "sdxl"]

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


def test_the_same_seed_gives_the_same_picture_after_other_loras(sdxl):
    """Merging and restoring leaves nothing behind: the bare model gives the same bits before and after."""
    probe, _ = sdxl
    (before,) = probe.latents(ask(31, scheduler=Scheduler.EULER_A))
    probe.latents(ask(32, loras=BOTH_LORAS), ask(33, loras=BOTH_LORAS[1:]))
    (after,) = probe.latents(ask(31, scheduler=Scheduler.EULER_A))
    assert torch.equal(before, after)


def test_a_request_whose_loras_made_room_for_another_tenant_has_the_same_bits(sdxl):
    """Its set, all that the cache holds, leaves at two steps for another tenant's and comes back: equal latents."""
    probe, reference = sdxl
    cache = probe.engine.pool.first.loras
    room = sum((reference.keywords["loras"] / f"{lora.name}.safetensors").stat().st_size for lora in BOTH_LORAS)
    asked = ask(35, steps=8, loras=BOTH_LORAS, tenant=Tenant(name="large"))
    (alone,) = probe.latents(asked)
    probe.engine.reconfigure(probe.engine.knobs.model_copy(update={"host_lora_bytes": room}))
    last_steps, errors, ends, ended = [], [], [], threading.Event()

    def tell(seed, event):
        if seed == 35 and isinstance(event, Progress) and event.step in (3, 5):
            other = ask(36 + event.step, steps=2, loras=(LoraRef(name="three"),), tenant=Tenant(name="other"))
            probe.engine.submit(other, lambda seen: tell(other.seed, seen))
        if isinstance(event, Progress) and event.step == event.steps:
            last_steps.append(seed)
        if isinstance(event, Failed):
            errors.append(event.error)
        if isinstance(event, Finished | Failed):
            ends.append(seed)
        if len(ends) == 3:
            ended.set()

    before = cache.statistics().evictions
    probe.decoded.clear()
    probe.engine.submit(asked, lambda event: tell(35, event))
    assert ended.wait(120.0)
    assert not errors
    assert last_steps == [39, 41, 35]  # images are decoded between the steps, in another order
    assert cache.statistics().evictions - before >= 3
    assert any(torch.equal(latents, alone) for latents in probe.decoded)
    probe.engine.reconfigure(probe.engine.knobs.model_copy(update={"host_lora_bytes": KNOBS.host_lora_bytes}))


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
