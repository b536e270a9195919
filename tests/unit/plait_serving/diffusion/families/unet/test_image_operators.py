"""The operators that OpenVINO may compute for images are those of the published architectures, no more and no less."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from plait_kernels.executors import Computation, ExecutorError
from plait_serving.diffusion.families.unet.bundle import outline_bundle
from plait_serving.diffusion.families.unet.computations import (
    IMAGE_OPERATORS,
    decoder_computation,
    encoder_computation,
    vae_computation,
)
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner
from plait_serving.diffusion.published.architectures import ARCHITECTURES, ModelPart
from plait_serving.images.config import STARTER_FOLDER

pytest.importorskip("openvino", reason="needs openvino")

from plait_kernels.executors import conversion  # after the skip


def narrow(part: ModelPart) -> Any:
    """A module of a published configuration, with few channels and layers."""
    config = dict(part.config)
    levels = len(config.get("block_out_channels", (0,) * 4))
    config["block_out_channels"] = (32, 64, 64, 64)[:levels]
    if not isinstance(config.get("attention_head_dim", 0), int):
        config["attention_head_dim"] = (1, 2, 2, 2)[:levels]
    config["layers_per_block"] = 1
    if "transformer_layers_per_block" in config:
        config["transformer_layers_per_block"] = 1
    return getattr(diffusers, part.class_name)(**config).eval().requires_grad_(requires_grad=False)


def computations(module: Any) -> Iterator[Computation]:
    """What an executor prepares of it."""
    if isinstance(module, diffusers.UNet2DConditionModel):
        yield encoder_computation(module)
        yield decoder_computation(module)
    elif isinstance(module, diffusers.AutoencoderKL):
        yield vae_computation(module)
    else:
        yield ControlNetModelRunner(module).computation()


def recorded(module: Any) -> frozenset[str]:
    """The operators that its traces hold."""
    found: set[str] = set()

    def record(traced: Any, example: Any) -> Any:
        found.update(conversion.traced_operators(traced))
        raise ExecutorError("recorded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "_through_frontend", record)
        for computation in computations(module):
            with pytest.raises(ExecutorError, match="recorded"):
                conversion.convert(dataclasses.replace(computation, operators=None))
    return frozenset(found)


def test_the_known_operators_are_those_of_the_published_architectures():
    """Stable Diffusion 1.5, 2.1 and XL and their ControlNets."""
    unets = [each for each in ARCHITECTURES.values() if all(part.folder != "transformer" for part in each.parts)]
    parts = [part for each in unets for part in each.parts if part.library == "diffusers"]
    assert len(parts) == 8
    modules = {str(module): module for module in map(narrow, parts)}  # their VAEs are alike
    assert frozenset().union(*map(recorded, modules.values())) == IMAGE_OPERATORS


def test_the_starter_has_no_other():
    """Its UNet, VAE and one of its ControlNets, which are alike."""
    emoji = outline_bundle(STARTER_FOLDER / "emoji").parts
    modules = [emoji["unet"].mapped(), emoji["vae"].mapped()]
    modules.append(diffusers.ControlNetModel.from_pretrained(STARTER_FOLDER / "controlnets" / "edges"))
    for module in modules:
        assert recorded(module) <= IMAGE_OPERATORS


def test_another_operator_is_refused_by_name():
    """A UNet whose activation is none of the published ones: torch runs it."""
    part = next(part for part in ARCHITECTURES["sd15"].parts if part.folder == "unet")
    unet = narrow(part)
    unet.mid_block.resnets[0].nonlinearity = nn.ELU()
    with torch.no_grad(), pytest.raises(ExecutorError, match="aten::elu is not known"):
        conversion.convert(encoder_computation(unet))
