"""LoHa, LoKr and DoRA files: what is refused, by which key, and what LyCORIS does where PEFT does nothing."""

from __future__ import annotations

import math

import pytest
import torch

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora.kinds import merged_in_turn
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.targets import LoraTargets, ModuleRef
from plait_serving.diffusion.values import LoraRef
from support.loras import TwoLayers, lycoris_tensors, peft_metadata, snapshot, write

torch.set_num_threads(1)

UNET = LoraTargets.of({"unet": TwoLayers()})


def refusal(tmp_path, tensors, metadata=None) -> str:
    """The message of the `LoraError` that a file brings."""
    with pytest.raises(LoraError) as caught:
        parse("mine", write(tmp_path / "a.safetensors", tensors, metadata), UNET)
    assert caught.value.message.startswith("LoRA 'mine': ")
    return caught.value.message


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("loha", "hada_w1_a"),
        ("loha", "hada_w2_b"),
        ("lokr", "lokr_w1"),
        ("lokr", "lokr_w2_b"),
        ("dora", "lora_up.weight"),
    ],
)
def test_a_missing_part_is_named(tmp_path, kind, part):
    """A file that lacks a tensor is refused with what is missing, and what is there."""
    tensors = lycoris_tensors(TwoLayers(), kind)
    del tensors[f"lora_unet_lin.{part}"]
    message = refusal(tmp_path, tensors)
    assert "unet.lin has no " + {"lora_up.weight": "up", "lokr_w1": "lokr_w1_a"}.get(part, part) in message
    assert "lora_unet_lin." in message


@pytest.mark.parametrize(
    ("kind", "part", "shape"),
    [
        ("loha", "hada_w1_a", (9, 2)),
        ("loha", "hada_w1_b", (3, 6)),
        ("loha", "hada_w2_b", (2,)),
        ("loha", "hada_t1", (2, 2, 3, 3)),
        ("lokr", "lokr_w1", (5, 2, 3)),
        ("lokr", "lokr_w1", (4, 1)),
        ("lokr", "lokr_w2_b", (2, 0)),
        ("lokr", "lokr_w2", (5, 6)),
        ("dora", "dora_scale", (9, 1)),
        ("dora", "dora_scale", (10, 6)),
        ("dora", "lora_magnitude_vector", (10,)),
        ("loha", "lokr_w1", (5, 1)),
        ("lokr", "lora_down.weight", (2, 6)),
    ],
)
def test_a_part_that_does_not_fit_is_named(tmp_path, kind, part, shape):
    """A tensor of a wrong shape, one too many, or one of another kind is refused by its key."""
    key = f"lora_unet_lin.{part}" if "vector" not in part else f"unet.lin.{part}"
    message = refusal(tmp_path, lycoris_tensors(TwoLayers(), kind) | {key: torch.ones(shape)})
    assert key in message or "mixes kohya and PEFT" in message


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("kind", "part"), [("loha", "hada_w2_a"), ("lokr", "lokr_w1"), ("lokr", "lokr_w2_a"), ("dora", "dora_scale")]
)
def test_non_finite_parts_are_refused(tmp_path, kind, part, bad):
    """One NaN or infinity anywhere refuses the file and names the module."""
    tensors = lycoris_tensors(TwoLayers(), kind)
    tensors[f"lora_unet_conv.{part}"].view(-1)[1] = bad
    assert "unet.conv holds NaN or infinity" in refusal(tmp_path, tensors)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64], ids=str)
def test_quantised_parts_are_refused(tmp_path, dtype):
    """Only floats are read, and the message names the key."""
    tensors = lycoris_tensors(TwoLayers(), "lokr")
    tensors["lora_unet_lin.lokr_w1"] = tensors["lora_unet_lin.lokr_w1"].to(dtype)
    assert "lora_unet_lin.lokr_w1 is" in refusal(tmp_path, tensors)


def test_a_dora_without_magnitudes_is_refused(tmp_path):
    """A file that says that it is a DoRA is not merged as if it were none."""
    tensors = {"unet.lin.lora_A.weight": torch.ones(2, 6), "unet.lin.lora_B.weight": torch.ones(10, 2)}
    assert "use_dora, but unet.lin has no magnitude" in refusal(tmp_path, tensors, peft_metadata(use_dora=True))


@pytest.mark.parametrize("module", ["lin", "conv"])
def test_magnitudes_of_input_channels(tmp_path, module):
    """A `dora_scale` of shape (1, i, ...) is LyCORIS' decomposition of columns: written out, channel by channel."""
    tensors = {key: value for key, value in lycoris_tensors(TwoLayers(), "dora").items() if f"_{module}." in key}
    weight = getattr(TwoLayers(), module).weight.detach().double()
    channels = weight.shape[1]
    scale = torch.rand(channels, generator=torch.Generator().manual_seed(2)) + 0.5
    tensors[f"lora_unet_{module}.dora_scale"] = scale.reshape(1, -1, *[1] * (weight.ndim - 2))
    got = parse("x", write(tmp_path / "a.safetensors", tensors), UNET).factors[ModuleRef("unet", module)]
    up, down = (tensors[f"lora_unet_{module}.lora_{way}.weight"].double() for way in ("up", "down"))
    wanted = weight + 0.7 / 2 * (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
    for channel in range(channels):
        wanted[:, channel] *= float(scale[channel]) / wanted[:, channel].norm()
    assert torch.allclose(merged_in_turn(weight, [(got, 0.7 / 2)]), wanted, rtol=1e-6)


@pytest.mark.parametrize("kind", ["loha", "lokr", "dora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_restoring_leaves_no_trace(tmp_path, kind, dtype):
    """After a merge of any kind the pristine weights come back bit for bit, and the same set gives the same bits."""
    parts = {"unet": TwoLayers(dtype)}
    got = {"x": parse("x", write(tmp_path / "x.safetensors", lycoris_tensors(TwoLayers(), kind)), UNET)}
    before, merger, chosen = snapshot(parts), Merger(parts), (LoraRef(name="x", scale=0.8),)
    merger.switch(chosen, got)
    merged = snapshot(parts)
    assert not torch.equal(merged["unet.conv.weight"], before["unet.conv.weight"])
    merger.switch((), {})
    assert all(torch.equal(value, before[key]) for key, value in snapshot(parts).items())
    merger.switch(chosen, got)
    assert all(torch.equal(value, merged[key]) for key, value in snapshot(parts).items())


def test_a_row_without_length_is_refused(tmp_path):
    """A DoRA whose sum is zero in a row has no direction: an error before anything is written, not NaN."""
    parts = {"unet": TwoLayers()}
    with torch.no_grad():
        parts["unet"].lin.weight[3] = 0.0
    tensors = {key: value for key, value in lycoris_tensors(TwoLayers(), "dora").items() if "_lin." in key}
    tensors["lora_unet_lin.lora_up.weight"][3] = 0.0
    got = parse("x", write(tmp_path / "x.safetensors", tensors), UNET)
    before, merger = snapshot(parts), Merger(parts)
    with pytest.raises(LoraError, match=r"unet\.lin would hold NaN or infinity"):
        merger.switch((LoraRef(name="x"),), {"x": got})
    assert all(torch.equal(value, before[key]) for key, value in snapshot(parts).items())
