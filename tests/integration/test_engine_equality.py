"""The whole engine against diffusers' pipelines: same seed, same latents, alone and in company.

A tiny random SDXL with two ControlNets and two LoRAs (zero convolutions randomised, or nothing would be proved), and
the starter models. diffusers' LoRAs are fused, as ours are: unfused branches round differently.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fakes.engine import EveryBatchPays
from plait_serving.diffusion.assemble import EngineSettings, build_engine
from plait_serving.diffusion.knobs import EngineKnobs, Placement
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.values import (
    ControlRef,
    Failed,
    Finished,
    ImageRequest,
    LoraRef,
    Progress,
    Scheduler,
    Tenant,
)
from plait_serving.images.config import STARTER_FOLDER
from support.closeness import EQUAL, IN_COMPANY, ulps
from support.engine_probe import Probe, fused_reference
from support.tiny import IMAGE_SIZE, tiny_lora

KNOBS = EngineKnobs(threads=1, controlnet_placement=Placement.LOCAL)


@pytest.fixture(scope="module")
def probe_of():
    """`probe_of(**settings)`: a started engine that is stopped at the end of the module."""
    probes = []

    def build(**settings) -> Probe:
        probes.append(
            Probe(build_engine(EngineSettings(knobs=KNOBS, converts=False, **settings), costs=EveryBatchPays()))
        )
        return probes[-1]

    yield build
    for probe in probes:
        probe.engine.stop(drain_s=0)


def control_image(seed: int, size: int) -> np.ndarray:
    """A deterministic image."""
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def request(seed: int, **more) -> ImageRequest:
    """A small request with defaults."""
    fields = {
        "request_id": f"r{seed}", "prompt": "a red cat", "negative_prompt": "blue", "width": IMAGE_SIZE,
        "height": IMAGE_SIZE, "steps": 4, "guidance_scale": 2.0, "seed": seed, "scheduler": Scheduler.DPMPP_2M, **more,
    }  # fmt: skip
    return ImageRequest(**fields)


@pytest.fixture(scope="module")
def loras(tiny_sdxl_folder, tmp_path_factory):
    """A folder of three LoRAs for the tiny SDXL."""
    folder = tmp_path_factory.mktemp("loras")
    tiny_lora(folder / "one.safetensors", tiny_sdxl_folder, fmt="peft", rank=3, with_text_encoder=True)
    tiny_lora(folder / "two.safetensors", tiny_sdxl_folder, fmt="kohya", rank=2, conv=True, seed=5)
    tiny_lora(folder / "three.safetensors", tiny_sdxl_folder, fmt="peft", rank=6, with_text_encoder=True, seed=7)
    return folder


@pytest.fixture(scope="module")
def sdxl(tiny_sdxl_folder, tiny_sdxl_controlnets, loras, probe_of):
    """The engine on the tiny SDXL, and a function that runs diffusers on the same request."""
    names = dict(zip(("a", "b"), tiny_sdxl_controlnets, strict=True))
    probe = probe_of(model=tiny_sdxl_folder, lora_source=FolderSource(loras), controlnets=names)

    kept: dict[Any, Any] = {}

    def reference(asked: ImageRequest) -> torch.Tensor:
        return fused_reference(tiny_sdxl_folder, asked, loras=loras, controlnets=names, kept=kept)

    return probe, reference


BOTH_CONTROLS = (
    ControlRef(name="a", image=control_image(1, IMAGE_SIZE), scale=0.8, start=0.0, end=0.6),
    ControlRef(name="b", image=control_image(2, IMAGE_SIZE), scale=0.5, start=0.25, end=1.0),
)
BOTH_LORAS = (LoraRef(name="one", scale=0.9), LoraRef(name="two", scale=-0.6))


def test_sdxl_with_two_controlnets_and_two_loras_equals_diffusers(sdxl):
    """One request with everything: equal latents; and each ingredient really changed the image."""
    probe, reference = sdxl
    asked = request(11, n=2, controlnets=BOTH_CONTROLS, loras=BOTH_LORAS)
    (ours,) = probe.latents(asked)
    assert ulps(ours, reference(asked)) <= EQUAL
    for less in (replace(asked, controlnets=BOTH_CONTROLS[:1]), replace(asked, loras=BOTH_LORAS[:1])):
        (other,) = probe.latents(less)
        assert (other - ours).abs().max() > 1e-2


def test_sdxl_in_company_equals_diffusers(sdxl):
    """Batched with requests at other steps, prompts, ControlNets and seeds: other batch sizes move bits only."""
    probe, reference = sdxl
    asked = request(21, controlnets=BOTH_CONTROLS, loras=BOTH_LORAS, scheduler=Scheduler.DPMPP_2M)
    company = [
        request(22, prompt="green tree", steps=7, loras=BOTH_LORAS),
        request(23, prompt="dog", steps=3, loras=BOTH_LORAS, controlnets=BOTH_CONTROLS[1:]),
        request(24, prompt="house", steps=5),
    ]
    ours = probe.latents(asked, *company)[0]
    assert ulps(ours, reference(asked)) <= IN_COMPANY


def test_the_same_seed_gives_the_same_picture_after_other_loras(sdxl):
    """Merging and restoring leaves nothing behind: the bare model gives the same bits before and after."""
    probe, _ = sdxl
    (before,) = probe.latents(request(31, scheduler=Scheduler.EULER_A))
    probe.latents(request(32, loras=BOTH_LORAS), request(33, loras=BOTH_LORAS[1:]))
    (after,) = probe.latents(request(31, scheduler=Scheduler.EULER_A))
    assert torch.equal(before, after)


def test_a_request_whose_loras_made_room_for_another_tenant_has_the_same_bits(sdxl, loras):
    """Its set, all that the cache holds, leaves at two steps for another tenant's and comes back: equal latents."""
    probe, _ = sdxl
    cache = probe.engine.pool.first.loras
    room = sum((loras / f"{lora.name}.safetensors").stat().st_size for lora in BOTH_LORAS)
    asked = request(35, steps=8, loras=BOTH_LORAS, tenant=Tenant(name="large"))
    (alone,) = probe.latents(asked)
    probe.engine.reconfigure(probe.engine.knobs.model_copy(update={"host_lora_bytes": room}))
    last_steps, errors, ends, ended = [], [], [], threading.Event()

    def tell(seed, event):
        if seed == 35 and isinstance(event, Progress) and event.step in (3, 5):
            other = request(36 + event.step, steps=2, loras=(LoraRef(name="three"),), tenant=Tenant(name="other"))
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
    assert last_steps == [39, 41, 35]  # images are decoded beside the steps, in another order
    assert cache.statistics().evictions - before >= 3
    assert any(torch.equal(latents, alone) for latents in probe.decoded)
    probe.engine.reconfigure(probe.engine.knobs.model_copy(update={"host_lora_bytes": KNOBS.host_lora_bytes}))


@pytest.fixture(scope="module")
def starter(probe_of):
    """The engine on the starter models."""
    return probe_of(
        model=STARTER_FOLDER / "emoji",
        lora_source=FolderSource(STARTER_FOLDER / "loras"),
        controlnets={name: STARTER_FOLDER / "controlnets" / name for name in ("edges", "colors")},
    )


@pytest.mark.parametrize("lora", ["noto", "sketch", "pixel"])
def test_starter_models_equal_diffusers(starter, lora):
    """The shipped folder, ControlNet and LoRA files give diffusers' latents."""
    control = ControlRef(name="edges", image=control_image(3, 64), scale=0.7)
    asked = request(
        41, prompt="red apple", width=64, height=64, steps=6, scheduler=Scheduler.DPMPP_2M, controlnets=(control,),
        loras=(LoraRef(name=lora, scale=0.7),),
    )  # fmt: skip
    (ours,) = starter.latents(asked)
    theirs = fused_reference(
        STARTER_FOLDER / "emoji", asked, loras=STARTER_FOLDER / "loras",
        controlnets={"edges": STARTER_FOLDER / "controlnets" / "edges"},
    )  # fmt: skip
    assert ulps(ours, theirs) <= EQUAL


def test_starter_base_equals_diffusers(starter):
    """The base alone, two images, equals the stock pipeline loaded from the same folder."""
    asked = request(51, prompt="rocket", negative_prompt="", width=64, height=64, steps=6, n=2)
    (ours,) = starter.latents(asked)
    assert ulps(ours, fused_reference(STARTER_FOLDER / "emoji", asked)) <= EQUAL


def test_decoder_rounds_as_diffusers():
    """Half-way values round to even, as numpy's round in diffusers' image processor does."""
    from plait_serving.diffusion.decoding import to_rgb

    values = torch.tensor([0.0, 0.5, 1.0, 127.5, 254.5]) / 255
    image = to_rgb(values.reshape(1, 1, 1, 5).expand(1, 3, 1, 5))[0]
    expected = (values.numpy() * 255).round().astype("uint8")
    assert np.array_equal(image[0, :, 0], expected)
