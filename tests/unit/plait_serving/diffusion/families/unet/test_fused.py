"""Fused modules: diffusers' results, the same parameters, and nothing of what they do not understand."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from torch import nn

from plait_serving.diffusion.families.unet import fused
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner, load_controlnet
from plait_serving.diffusion.families.unet.denoiser import UNetDenoiser
from plait_serving.diffusion.families.unet.fused import fuse_
from plait_serving.diffusion.knobs import Exact
from plait_serving.diffusion.protocols import ControlCall
from support.bundles import load_bundle
from support.closeness import EQUAL, ulps
from support.denoise import control_image, first_call, make_request
from support.tiny import randomise_zero_convolutions, seeded

SDXL = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2),
    "cross_attention_dim": 24,
    "norm_num_groups": 8,
}
SD15 = {**SDXL, "use_linear_projection": False}
UP = {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}


def unet(config: dict[str, Any], **changes: Any) -> UNet2DConditionModel:
    """A random UNet in eval mode, affine parameters of norms too."""
    with seeded(0):
        model = UNet2DConditionModel(**{**config, **UP, **changes}).eval().requires_grad_(requires_grad=False)
        for module in model.modules():
            if isinstance(module, nn.GroupNorm):
                module.weight.normal_()
                module.bias.normal_()
    return model


def inputs(rows: int = 2) -> dict[str, Any]:
    """What both models take."""
    generator = torch.Generator().manual_seed(1)
    return {
        "sample": torch.randn(rows, 4, 12, 16, generator=generator),
        "timestep": torch.tensor([10, 700])[:rows],
        "encoder_hidden_states": torch.randn(rows, 7, 24, generator=generator),
    }


@torch.inference_mode()
def run(model: nn.Module, **more: Any) -> torch.Tensor:
    """The model's output."""
    return model(**inputs(), **more, return_dict=False)[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that fused modules ask for."""
    seen: list[str] = []
    load: Callable[..., Any] = fused.load

    def watched(op: str, *args: Any, **sizes: int) -> Any:
        seen.append(op)
        return load(op, *args, **sizes)

    monkeypatch.setattr(fused, "load", watched)
    return seen


@pytest.mark.parametrize("config", [SDXL, SD15], ids=["linear", "convolution"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_fused_unet_predicts_what_diffusers_predicts(config, layout, calls):
    """On the CPU through the references: the same numbers."""
    model = unet(config).to(memory_format=layout)
    twin = copy.deepcopy(model)
    fusion = fuse_(twin)
    expected, got = run(model), run(twin)
    assert ulps(got, expected) <= EQUAL
    norms = sum(isinstance(module, nn.GroupNorm) for module in model.modules())
    assert calls.count("group_norm_silu") == norms
    assert calls.count("geglu") == sum(type(module).__name__ == "GEGLU" for module in model.modules()) > 0
    assert fusion.modules > 0


def test_a_fused_controlnet_answers_what_diffusers_answers(calls):
    """Every residual."""
    with seeded(0):
        model = ControlNetModel(**{k: v for k, v in SDXL.items() if k != "sample_size"}).eval()
        randomise_zero_convolutions(model)
    twin = copy.deepcopy(model)
    fuse_(twin)
    with torch.inference_mode():
        image = torch.rand(2, 3, 96, 128, generator=torch.Generator().manual_seed(2))
        down, mid = model(**inputs(), controlnet_cond=image, return_dict=False)
        fused_down, fused_mid = twin(**inputs(), controlnet_cond=image, return_dict=False)
    for ours, theirs in zip((*fused_down, fused_mid), (*down, mid), strict=True):
        assert ulps(ours, theirs) <= EQUAL
    assert {"group_norm_silu", "geglu"} == set(calls)


def test_parameters_keep_names_and_addresses():
    """A merge in place is seen, a state dict loads."""
    model = unet(SDXL)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    plain = run(model)
    fuse_(model)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    weight = model.get_parameter("down_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj.weight")
    with torch.inference_mode():
        weight.mul_(3.0)
        merged = run(model)
        assert not torch.allclose(merged, plain, atol=1e-3)
        weight.div_(3.0)
    assert ulps(run(model), plain) <= EQUAL


def test_blocks_of_another_kind_stay_as_they_are(calls):
    """Scale-shift time embeddings and blocks that change the size are diffusers' own."""
    model = unet(SDXL, resnet_time_scale_shift="scale_shift", resnet_skip_time_act=True)
    twin = copy.deepcopy(model)
    fuse_(twin)
    assert not any(type(module).__name__ == "_FusedResnet" for module in twin.modules())
    assert ulps(run(twin), run(model)) <= EQUAL
    assert "group_norm_silu" in calls


def test_a_gpus_denoiser_computes_through_operators(tiny_sd_folder, calls):
    """Unless the knob asks for diffusers' bits, from the next step on."""
    bundle = load_bundle(tiny_sd_folder)
    call = first_call(UNetDenoiser(bundle), make_request())
    plain = UNetDenoiser(bundle).predict([call])[0]
    assert calls == []
    knob = [Exact.NEVER]
    on_gpu = UNetDenoiser(dataclasses.replace(bundle, device=torch.device("cuda")), exact=lambda: knob[0])
    got = on_gpu.predict([call])[0]
    assert {"group_norm_silu", "geglu"} == set(calls)
    assert ulps(got, plain) <= EQUAL
    calls.clear()
    knob[0] = Exact.ALWAYS
    assert torch.equal(on_gpu.predict([call])[0], plain)
    assert calls == []


def test_a_gpus_controlnet_computes_through_operators(tiny_sd_folder, tiny_sd_controlnets, monkeypatch, calls):
    """Unless a block of the batch needs diffusers' bits."""
    bundle = load_bundle(tiny_sd_folder)
    call = first_call(UNetDenoiser(bundle), make_request())
    model = load_controlnet(tiny_sd_controlnets[0], dtype=torch.float32).model
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "device", torch.device("cuda"))
        runner = ControlNetModelRunner(model)
    runner.device = torch.device("cpu")
    constants = runner.open(image=control_image(1), conditioning=call.conditioning, width=32, height=32)
    sample = torch.cat([call.sample] * 2)
    for exact in (True, False):
        rows = ControlCall(session=constants, sample=sample, timestep=call.timestep, scale=1.0, exact=exact)
        assert len(runner.residuals([rows])) == 1
        assert bool(calls) is not exact
