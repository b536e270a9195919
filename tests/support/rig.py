"""An engine on a tiny model with a ControlNet and a LoRA, beside diffusers' pipeline on the same files."""

from __future__ import annotations

from functools import partial

import pytest

from fakes.engine import EveryBatchPays
from plait_serving.diffusion.assemble import EngineSettings, build_engine
from plait_serving.diffusion.knobs import EngineKnobs, Placement
from plait_serving.diffusion.lora.source import FolderSource
from support.engine_probe import Probe, fused_reference
from support.tiny import tiny_lora

KNOBS = EngineKnobs(threads=1, controlnet_placement=Placement.LOCAL)


@pytest.fixture(scope="module")
def rig_of(tmp_path_factory):
    """``rig_of(folder, controlnet)``: a probe on the model with that ControlNet and a LoRA, and diffusers on both."""
    probes = []

    def build(folder, controlnet):
        loras = tmp_path_factory.mktemp("loras")
        tiny_lora(loras / "one.safetensors", folder, fmt="peft", rank=3, with_text_encoder=True)
        settings = EngineSettings(
            model=folder, lora_source=FolderSource(loras), controlnets={"a": controlnet}, knobs=KNOBS, converts=False
        )
        probes.append(Probe(build_engine(settings, costs=EveryBatchPays())))
        theirs = partial(fused_reference, folder, loras=loras, controlnets={"a": controlnet}, kept={})
        return probes[-1], theirs

    yield build
    for probe in probes:
        probe.engine.stop(drain_s=0)


@pytest.fixture(scope="module")
def sd(rig_of, tiny_sd_folder, tiny_sd_controlnets):
    """The tiny Stable Diffusion."""
    return rig_of(tiny_sd_folder, tiny_sd_controlnets[0])


@pytest.fixture(scope="module")
def sdxl(rig_of, tiny_sdxl_folder, tiny_sdxl_controlnets):
    """The tiny SDXL."""
    return rig_of(tiny_sdxl_folder, tiny_sdxl_controlnets[0])
