"""The UNet's halves against `UNet2DConditionModel.forward`, and the layers of the fast path against the modules."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel

from plait_serving.diffusion.controlnet.fast import FastControlNet
from plait_serving.diffusion.denoisers.fast import FastHalves, fast_text
from plait_serving.diffusion.denoisers.halves import added_embedding, decoder_half, encoder_half, time_embedding
from plait_serving.diffusion.denoisers.layers import group_norm, why_not_fast
from plait_serving.diffusion.protocols import Residuals
from support.tiny import seeded

ROUNDING = 2e-5
"""Largest difference of two fp32 evaluations of a tiny UNet whose outputs are of order 1 (measured: 4e-6)."""


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


def halves(
    unet, given: dict, residuals: Residuals | None = None, *, fast: bool = False, packed_bytes: int = 1 << 30
) -> torch.Tensor:
    """The model output through the two halves."""
    sample, text = given["sample"], given["encoder_hidden_states"]
    embedding = time_embedding(unet, sample, given["timestep"], None)
    augmentation = added_embedding(unet, embedding, text, given["added_cond_kwargs"])
    fast_halves = FastHalves(unet, packed_bytes=packed_bytes)
    if fast:
        half = fast_halves.encode(sample, embedding, fast_text(unet, text), augmentation)
    else:
        half = encoder_half(unet, sample, embedding, text, augmentation)
    if residuals is not None:
        half.add([slice(0, len(sample))], residuals)
    return fast_halves.decode(half) if fast else decoder_half(unet, half)


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
    """Encoder half, residuals of two ControlNets, decoder half: `torch.equal` to the UNet's forward."""
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
def test_fast_halves_differ_by_rounding_only(case):
    """The fast layers compute the same function, with and without residuals, at a size that does not halve evenly."""
    unet, given, residuals = case
    assert why_not_fast(unet) is None
    for added, packed_bytes in ((None, 1 << 30), (residuals, 1 << 30), (residuals, 0)):
        fast = halves(unet, given, added, fast=True, packed_bytes=packed_bytes)
        exact = halves(unet, given, added)
        assert fast.shape == exact.shape
        assert fast.is_contiguous()
        assert float((fast - exact).abs().max()) < ROUNDING


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
        probe = encoder_half(unet, given["sample"], time_embedding(unet, given["sample"], given["timestep"], None),
                             given["encoder_hidden_states"], None)  # fmt: skip
        residuals = Residuals(down=tuple(torch.randn_like(s) for s in probe.skips), mid=torch.randn_like(probe.sample))
    whole = unet(
        **given, down_block_additional_residuals=residuals.down, mid_block_additional_residual=residuals.mid,
        return_dict=False,
    )[0]  # fmt: skip
    assert torch.equal(halves(unet, given, residuals), whole)
    assert float((halves(unet, given, residuals, fast=True) - whole).abs().max()) < ROUNDING


@pytest.mark.parametrize(("shape", "offset"), [((2, 48, 32, 32), 0.0), ((3, 40, 31, 33), 30.0), ((1, 8, 4, 4), 1.0)])
@torch.inference_mode()
def test_group_norm_agrees_with_torch(shape, offset):
    """Our channels-last group norm, large (own code) and small (torch's), also far from zero mean."""
    norm = torch.nn.GroupNorm(8, shape[1], eps=1e-6)
    with seeded(1):
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
        x = (torch.randn(shape) + offset).contiguous(memory_format=torch.channels_last)
    truth = norm.double()(x.double())
    ours = group_norm(norm.float(), x)
    tolerance = 4 * float((norm(x).double() - truth).abs().max()) + 1e-6
    assert float((ours.double() - truth).abs().max()) <= tolerance


def test_layers_that_we_do_not_know_are_refused_by_the_fast_path():
    """A UNet with scale-shift time embeddings, or another feed-forward, runs through diffusers' modules instead."""
    unet = UNet2DConditionModel(
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, cross_attention_dim=8, attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        resnet_time_scale_shift="scale_shift",
    )  # fmt: skip
    assert "scale_shift" in why_not_fast(unet)


def test_diffusers_is_within_the_pin():
    """The halves were written after this release line; a newer one needs them compared again (then move the pin)."""
    assert version("diffusers").startswith("0.42.")


@pytest.mark.parametrize("name", ["sd", "sdxl"])
@torch.inference_mode()
def test_a_fast_controlnet_agrees_with_diffusers(name, request):
    """Residuals for two requests' rows, with a scale per row, equal the module's up to rounding; text is reused."""
    net = ControlNetModel.from_pretrained(request.getfixturevalue(f"tiny_{name}_controlnets")[0])
    assert FastControlNet.why_not(net) is None
    given = inputs(net)
    with seeded(6):
        image = torch.rand(3, 3, 32, 36)
    scale = torch.tensor([0.5, 1.0, 1.5]).view(3, 1, 1, 1)
    down, mid = net(**given, controlnet_cond=image, conditioning_scale=scale, return_dict=False)
    fast = FastControlNet(net)
    text = given["encoder_hidden_states"]
    texts = [text[:2].clone(), text[2:].clone()]
    for _ in range(2):
        our_down, our_mid = fast.residuals(
            sample=given["sample"], timesteps=given["timestep"], texts=texts, repeats=[1, 1],
            embedding=net.controlnet_cond_embedding(image), scale=scale, added=given["added_cond_kwargs"] or None,
        )  # fmt: skip
        assert len(our_down) == len(down)
        for ours, theirs in zip((*our_down, our_mid), (*down, mid), strict=True):
            assert ours.shape == theirs.shape
            assert float((ours - theirs).abs().max()) < ROUNDING
    assert len(fast._texts) == 1
