"""What executors prepare and probe of a UNet and of a ControlNet."""

from __future__ import annotations

import pytest
from diffusers import ControlNetModel, UNet2DConditionModel

from plait_serving.diffusion.families.unet.computations import (
    controlnet_computation,
    decoder_computation,
    encoder_computation,
)
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner
from support.tiny import seeded


@pytest.mark.parametrize("levels", [2, 3, 5, 6])
def test_the_probe_has_several_pixels_at_the_deepest_level(levels):
    """However many levels there are: attention over one pixel would spoil the program for all other sizes."""
    kinds = ["CrossAttnDownBlock2D"] * (levels - 1) + ["DownBlock2D"]
    sizes = {"block_out_channels": (8,) * levels, "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 2}
    with seeded(0):
        unet = UNet2DConditionModel(
            cross_attention_dim=6, down_block_types=kinds,
            up_block_types=[kind.replace("Down", "Up") for kind in reversed(kinds)], **sizes,
        )  # fmt: skip
        net = ControlNetModel(cross_attention_dim=6, down_block_types=kinds, **sizes)
    mid, *_ = decoder_computation(unet).example
    assert min(mid.shape[-2:]) >= 2
    runner = ControlNetModelRunner(net)
    for computation in (encoder_computation(unet), controlnet_computation(runner._headless)):
        *_, deepest = computation.module(*computation.example)
        assert min(deepest.shape[-2:]) >= 2
