"""The UNet's halves against `UNet2DConditionModel.forward`."""

from __future__ import annotations

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel

from plait_serving.diffusion.families.unet.halves import decoder_half, encoder_half, time_embedding
from plait_serving.diffusion.protocols import Residuals
from support.tiny import seeded


def inputs(unet, *, rows: int = 3, side: int = 16) -> dict:
    """Random inputs of a UNet, every row at its own timestep."""
    with seeded(3):
        width = unet.config.cross_attention_dim
        added = {}
        if unet.config.addition_embed_type:
            added = {"text_embeds": torch.randn(rows, 32), "time_ids": torch.rand(rows, 6) * 32}
        return {
            "sample": torch.randn(rows, 4, side, side + 2),
            "timestep": torch.tensor([981, 500, 1][:rows]),
            "encoder_hidden_states": torch.randn(rows, 77, width),
            "added_cond_kwargs": added,
        }


def embedding_of(unet, given: dict) -> torch.Tensor:
    """The finished time embedding."""
    sample, text = given["sample"], given["encoder_hidden_states"]
    return time_embedding(unet, sample, given["timestep"], text, added=given["added_cond_kwargs"], guidance=None)


def halves(unet, given: dict, residuals: Residuals | None = None) -> torch.Tensor:
    """The model output through the two halves."""
    sample, text = given["sample"], given["encoder_hidden_states"]
    half = encoder_half(unet, sample, embedding_of(unet, given), text)
    if residuals is not None:
        half.add([slice(0, len(sample))], residuals)
    return decoder_half(unet, half)


@pytest.fixture(params=["sd", "sdxl"])
def case(request):
    """A tiny UNet with the residuals of two ControlNets, summed."""
    folder = request.getfixturevalue(f"tiny_{request.param}_folder")
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    given = inputs(unet)
    nets = [
        ControlNetModel.from_pretrained(path) for path in request.getfixturevalue(f"tiny_{request.param}_controlnets")
    ]
    with torch.inference_mode(), seeded(4):
        image = torch.rand(3, 3, 32, 36)
        answers = [net(**given, controlnet_cond=image, conditioning_scale=0.7, return_dict=False) for net in nets]
    down = tuple(a + b for a, b in zip(answers[0][0], answers[1][0], strict=True))
    return unet, given, Residuals(down=down, mid=answers[0][1] + answers[1][1])


@torch.inference_mode()
def test_halves_have_the_bits_of_the_whole(case):
    """Encoder half, residuals of two ControlNets, decoder half: `torch.equal` to the UNet's forward, which doubles
    sides where these are taken from the skips."""
    unet, given, residuals = case
    whole = unet(
        **given, down_block_additional_residuals=residuals.down, mid_block_additional_residual=residuals.mid,
        return_dict=False,
    )[0]  # fmt: skip
    assert torch.equal(halves(unet, given, residuals), whole)
    plain = unet(**given, return_dict=False)[0]
    assert torch.equal(halves(unet, given), plain)
    assert not torch.allclose(plain, whole, atol=1e-2)


@torch.inference_mode()
def test_a_size_that_does_not_halve_has_the_bits_of_the_whole(case):
    """Odd sides: upsampling takes its size from the skips, like the UNet's forward."""
    unet, given, _ = case
    odd = {**given, "sample": given["sample"][..., :15, :17]}
    assert torch.equal(halves(unet, odd), unet(**odd, return_dict=False)[0])


@torch.inference_mode()
def test_without_a_mid_block_residuals_are_added_once():
    """A UNet whose mid block is missing hands the same tensor to skip and decoder; adding must not happen twice."""
    with seeded(0):
        unet = UNet2DConditionModel(
            sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=8,
            attention_head_dim=2, mid_block_type=None, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ).eval()  # fmt: skip
        given = inputs(unet, rows=2, side=8)
        probe = encoder_half(unet, given["sample"], embedding_of(unet, given), given["encoder_hidden_states"])
        residuals = Residuals(down=tuple(torch.randn_like(s) for s in probe.skips), mid=torch.randn_like(probe.sample))
    whole = unet(
        **given, down_block_additional_residuals=residuals.down, mid_block_additional_residual=residuals.mid,
        return_dict=False,
    )[0]  # fmt: skip
    assert torch.equal(halves(unet, given, residuals), whole)
