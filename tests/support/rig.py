"""Engines on tiny models with ControlNets and LoRAs, beside diffusers' pipelines on the same files."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fakes.engine import EveryBatchPays
from plait_serving.diffusion.assemble import EngineSettings, build_engine
from plait_serving.diffusion.knobs import EngineKnobs, Placement
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.values import ImageRequest, Scheduler
from support.denoise import make_request
from support.engine_probe import Probe, fused_reference
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
    probes = []

    def build(folder, controlnets, loras=None, dtype="float32"):
        if loras is None:
            loras = tmp_path_factory.mktemp("loras")
            tiny_lora(loras / "one.safetensors", folder, fmt="peft", rank=3, with_text_encoder=True)
            tiny_lora(loras / "two.safetensors", folder, fmt="kohya", rank=2, conv=True, seed=5)
        settings = EngineSettings(
            model=folder, lora_source=FolderSource(loras), controlnets=controlnets, knobs=KNOBS, converts=False,
            dtype=dtype,
        )  # fmt: skip
        probes.append(Probe(build_engine(settings, costs=EveryBatchPays())))
        reference = partial(fused_reference, folder, loras=loras, controlnets=controlnets, kept={})
        return probes[-1], partial(reference, dtype=getattr(torch, dtype))

    yield build
    for probe in probes:
        probe.engine.stop(drain_s=0)


@pytest.fixture(scope="module")
def sd(rig_of, tiny_sd_folder, tiny_sd_controlnets):
    """The tiny Stable Diffusion."""
    return rig_of(tiny_sd_folder, {"a": tiny_sd_controlnets[0]})


@pytest.fixture(scope="module")
def sdxl(rig_of, tiny_sdxl_folder, tiny_sdxl_controlnets):
    """The tiny SDXL."""
    return rig_of(tiny_sdxl_folder, dict(zip("ab", tiny_sdxl_controlnets, strict=True)))
