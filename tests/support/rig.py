"""Engines on tiny models with ControlNets and LoRAs, beside diffusers' pipelines on the same files."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest
import torch

from plait_serving.diffusion.knobs import EngineKnobs, Placement
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.values import ImageRequest, Scheduler
from support.denoise import make_request
from support.engine_probe import fused_reference, probed
from support.tiny import tiny_lora

KNOBS = EngineKnobs(threads=1, controlnet_placement=Placement.LOCAL)


def ask(seed: int, **more) -> ImageRequest:
    """A small request with guidance."""
    fields = {"request_id": f"r{seed}", "prompt": "a red cat", "negative_prompt": "blue", "steps": 5,
              "guidance_scale": 2.0, "scheduler": Scheduler.EULER, **more}  # fmt: skip
    return make_request(seed=seed, **fields)


@pytest.fixture(scope="module")
def rig_of(tmp_path_factory):
    """``rig_of(folder, controlnets)``: a probe on the model with those ControlNets and the LoRAs of a folder (or tiny
    ones: one, two), and diffusers on both, in float32 or another dtype."""

    def build(folder, controlnets, loras=None, dtype="float32"):
        if loras is None:
            loras = tmp_path_factory.mktemp("loras")
            tiny_lora(loras / "one.safetensors", folder, fmt="peft", rank=3, with_text_encoder=True)
            tiny_lora(loras / "two.safetensors", folder, fmt="kohya", rank=2, conv=True, seed=5)
        engine = probed(
            model=folder, lora_source=FolderSource(loras), controlnets=controlnets, knobs=KNOBS, converts=False,
            dtype=dtype,
        )  # fmt: skip
        reference = partial(fused_reference, folder, loras=loras, controlnets=controlnets, kept={})
        return stack.enter_context(engine), partial(reference, dtype=getattr(torch, dtype))

    with ExitStack() as stack:
        yield build


@pytest.fixture(scope="module")
def sd(rig_of, tiny_sd_folder, tiny_sd_controlnets):
    """The tiny Stable Diffusion."""
    return rig_of(tiny_sd_folder, {"a": tiny_sd_controlnets[0]})


@pytest.fixture(scope="module")
def sdxl(rig_of, tiny_sdxl_folder, tiny_sdxl_controlnets):
    """The tiny SDXL."""
    return rig_of(tiny_sdxl_folder, dict(zip("ab", tiny_sdxl_controlnets, strict=True)))
