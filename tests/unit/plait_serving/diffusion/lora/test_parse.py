"""Parsing LoRA files: every spelling is understood, everything else is refused by name, nothing is dropped."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora import container
from plait_serving.diffusion.lora import parse as parsing
from plait_serving.diffusion.lora.keys import meaning
from plait_serving.diffusion.lora.kinds import merged_in_turn
from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.lora.targets import LoraTargets, ModuleRef
from support.loras import (
    TinyFactor,
    TwoLayers,
    factors,
    kohya_tensors,
    lycoris_tensors,
    peft_metadata,
    peft_tensors,
    shapes_of,
    write,
)

torch.set_num_threads(1)


def flat_clip() -> nn.Module:
    """CLIPTextModel's names since transformers 5."""
    projections = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q_proj", "k_proj", "v_proj", "out_proj")})
    layer = nn.ModuleDict({"self_attn": projections, "mlp": nn.ModuleDict({"fc1": nn.Linear(4, 6)})})
    return nn.ModuleDict({"encoder": nn.ModuleDict({"layers": nn.ModuleList([layer])})})


def nested_clip() -> nn.Module:
    """CLIPTextModelWithProjection's names, and CLIPTextModel's before transformers 5."""
    return nn.ModuleDict({"text_model": flat_clip()})


def attention() -> nn.Module:
    """A UNet's: ``attn1.to_q`` and ``attn1.to_out.0``."""
    layers = {"to_q": nn.Linear(4, 4), "to_out": nn.ModuleList([nn.Linear(4, 4)])}
    return nn.ModuleDict({"attn1": nn.ModuleDict(layers)})


UNET = LoraTargets.of({"unet": TwoLayers()})


def check(got: LoadedLora, ref: ModuleRef, wanted: TinyFactor) -> None:
    """The factors are those of the file."""
    assert all(map(torch.equal, got.factors[ref].plain, (wanted.up, wanted.down)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes(tmp_path, dtype):
    """Factors stay in the file's dtype: an fp16 file takes fp16's memory."""
    made = factors(shapes_of(TwoLayers()), seed=4)
    path = write(tmp_path / "a.safetensors", peft_tensors(made), dtype=dtype)
    got = parse("x", path, UNET)
    up, down = got.factors[ModuleRef("unet", "lin")].plain
    assert down.dtype == up.dtype == dtype
    assert torch.equal(down, made["lin"].down.to(dtype))
    numbers = sum(value.numel() for factor in made.values() for value in (factor.up, factor.down))
    assert got.nbytes == numbers * dtype.itemsize


@pytest.mark.parametrize(
    ("spelling", "ways", "module"),
    [
        ("attn1.to_q.{}.weight", ("lora_A", "lora_B"), "to_q"),
        ("attn1.to_q.{}.default.weight", ("lora_A", "lora_B"), "to_q"),
        ("attn1.to_q.lora.{}.weight", ("down", "up"), "to_q"),
        ("attn1.processor.to_q.lora.{}.weight", ("down", "up"), "to_q"),
        ("attn1.processor.to_out_lora.{}.weight", ("down", "up"), "to_out.0"),
        ("attn1.to_out.0.lora.{}.weight", ("down", "up"), "to_out.0"),
        ("attn1.processor.to_out.lora.{}.weight", ("down", "up"), "to_out.0"),
    ],
)
@pytest.mark.parametrize("prefix", ["unet.", ""])
def test_unet_spellings(tmp_path, prefix, spelling, ways, module):
    """Every way diffusers ever wrote a UNet LoRA, with and without the component's name; old files say to_out where the
    model has to_out.0."""
    wanted = factors({"q": (4, 4)})["q"]
    down, up = (prefix + spelling.format(way) for way in ways)
    path = write(tmp_path / "a.safetensors", {down: wanted.down, up: wanted.up})
    got = parse("x", path, LoraTargets.of({"unet": attention()}))
    check(got, ModuleRef("unet", f"attn1.{module}"), wanted)


def test_each_key_is_looked_up_once(tmp_path, monkeypatch):
    """Though the header is read before the file is: it is most of what a small file takes."""
    looked_up: list[str] = []

    def counted(key, targets):
        looked_up.append(key)
        return meaning(key, targets)

    monkeypatch.setattr(parsing, "meaning", counted)
    tensors = peft_tensors(factors(shapes_of(TwoLayers())))
    parse("x", write(tmp_path / "a.safetensors", tensors), UNET)
    assert sorted(looked_up) == sorted(tensors)


@pytest.mark.parametrize("model", [flat_clip, nested_clip])
@pytest.mark.parametrize(
    ("component", "kohya"), [("text_encoder", "lora_te"), ("text_encoder", "lora_te1"), ("text_encoder_2", "lora_te2")]
)
@pytest.mark.parametrize("text_model", ["", "text_model."])
@pytest.mark.parametrize(
    ("spelling", "ways"),
    [
        ("{component}.{path}.q_proj.{way}.weight", ("lora_A", "lora_B")),
        ("{component}.{path}.q_proj.lora_linear_layer.{way}.weight", ("down", "up")),
        ("{component}.{path}.to_q_lora.{way}.weight", ("down", "up")),
        ("{kohya}_{flat}_q_proj.lora_{way}.weight", ("down", "up")),
    ],
)
def test_text_encoder_spellings(tmp_path, model, component, kohya, text_model, spelling, ways):
    """Files with and without ``text_model.`` fit encoders with and without it, in every spelling."""
    path = f"{text_model}encoder.layers.0.self_attn"
    wanted = factors({"q": (4, 4)})["q"]
    down, up = (
        spelling.format(component=component, path=path, kohya=kohya, flat=path.replace(".", "_"), way=way)
        for way in ways
    )
    file = write(tmp_path / "a.safetensors", {down: wanted.down, up: wanted.up})
    got = parse("x", file, LoraTargets.of({component: model()}))
    there = "text_model." if model is nested_clip else ""
    check(got, ModuleRef(component, f"{there}encoder.layers.0.self_attn.q_proj"), wanted)
    assert got.touches_text_encoder


# ---- alpha ----------------------------------------------------------------------------------------------------------


def alpha_of(tmp_path, tensors, metadata=None) -> float:
    """The alpha that a file gives the layer ``lin``."""
    got = parse("x", write(tmp_path / "a.safetensors", tensors, metadata), UNET)
    return got.factors[ModuleRef("unet", "lin")].alpha


@pytest.mark.parametrize("stored", [torch.tensor(4.0), torch.tensor([4.0]), torch.tensor(4.0).half(), torch.tensor(4)])
def test_alpha_key(tmp_path, stored):
    """kohya's alpha is read as one number, whatever its shape; some trainers store an integer."""
    tensors = kohya_tensors(factors({"lin": (10, 6)}))
    tensors["lora_unet_lin.alpha"] = stored
    assert alpha_of(tmp_path, tensors) == 4.0


@pytest.mark.parametrize(
    ("config", "alpha"),
    [
        ({"r": 4, "lora_alpha": 8}, 8.0),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"^lin": 2.0}}, 2.0),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"in": 2.0, "other.lin": 3.0}}, 8.0),
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 16.0),
        ({"r": 4}, 4.0),
        ({}, 4.0),
    ],
    ids=str,
)
def test_alpha_from_metadata(tmp_path, config, alpha):
    """The LoraConfig that diffusers saves decides, by PEFT's rules; rank-stabilised LoRAs divide by sqrt(rank). Without
    an alpha it is the rank."""
    tensors = peft_tensors(factors({"lin": (10, 6)}, rank=4))
    assert math.isclose(alpha_of(tmp_path, tensors, peft_metadata("unet", **config)), alpha)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"lora_adapter_metadata": "{nonsense"}, "no JSON"),
        ({"lora_adapter_metadata": "[1]"}, "no table"),
        ({"lora_adapter_metadata": f'{{"unet.r": {"9" * 4_300}}}'}, r"the integer 9{19}\.\.\. has 4300 digits"),
        (peft_metadata(lora_bias=True, lora_alpha=1), "lora_bias"),
        (peft_metadata(lora_alpha="eight"), "the alpha 'eight'"),
        (peft_metadata(lora_alpha=1, alpha_pattern={"(a+)+$": 1}), "pattern"),
        (peft_metadata(lora_alpha=0), "alpha 0"),
    ],
)
def test_metadata_that_can_not_be_honoured(tmp_path, metadata, sentence):
    """Rather no image than one with another strength than the file's."""
    with pytest.raises(LoraError, match=sentence):
        alpha_of(tmp_path, peft_tensors(factors({"lin": (10, 6)})), metadata)


@pytest.mark.parametrize("alpha", [math.nan, math.inf, 0.0])
def test_senseless_alpha_is_refused(tmp_path, alpha):
    """NaN, infinity and zero are no alpha."""
    tensors = kohya_tensors(factors({"lin": (10, 6)}))
    tensors["lora_unet_lin.alpha"] = torch.tensor(alpha)
    with pytest.raises(LoraError, match="lin has alpha"):
        alpha_of(tmp_path, tensors)


# ---- refusals -------------------------------------------------------------------------------------------------------


def refusal(tmp_path, tensors, metadata=None) -> str:
    """The message of the `LoraError` that a file brings."""
    path = write(tmp_path / "a.safetensors", tensors, metadata)
    with pytest.raises(LoraError) as caught:
        parse("mine", path, UNET)
    assert caught.value.param == "loras"
    assert caught.value.message.startswith("LoRA 'mine': ")
    return caught.value.message


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("lora_unet_conv.lora_mid.weight", "Tucker"),
        ("lora_unet_lin.on_input", "IA3"),
        ("lora_unet_lin.oft_blocks", "OFT"),
        ("lora_unet_lin.a1.weight", "GLoRA"),
        ("unet.lin.lora_B.bias", "biases"),
        ("text_encoder.embeddings.lora_embedding_A", "embedding"),
        ("emb_params", "textual inversion"),
        ("lora_controlnet", "Control-LoRA"),
        ("base_model.model.lin.lora_A.weight", "PEFT adapter"),
        ("lora_transformer_blocks_0.lora_down.weight", "transformer"),
        ("lycoris_transformer_blocks_0_attn_to_q.lokr_w1", "transformer"),
        ("model.diffusion_model.out.2.weight", "whole model"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path, key, name):
    """A file that is not a plain LoRA is refused by what it is, even among good keys."""
    message = refusal(tmp_path, {**peft_tensors(factors({"lin": (10, 6)})), key: torch.ones(2, 2)})
    assert name in message
    assert key in message


@pytest.mark.parametrize(
    "key",
    [
        "unet.other.lora_A.weight",
        "lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
        "unet.norm.lora_A.weight",
        "unet.grouped.lora_A.weight",
        "lin",
        "unet.lin.alpha.alpha",
    ],
)
def test_keys_that_match_nothing_are_listed(tmp_path, key):
    """One stray key refuses the file, and the message shows it."""
    message = refusal(tmp_path, {**peft_tensors(factors({"lin": (10, 6)})), key: torch.ones(2, 2)})
    assert "1 of 3 keys match nothing" in message
    assert key in message


@pytest.mark.parametrize(
    ("module", "down", "up"),
    [
        ("lin", (2, 7), (10, 2)),
        ("lin", (2, 6), (9, 2)),
        ("lin", (12,), (10, 2)),
        ("conv", (2, 27), (4, 2)),
        ("conv", (2, 3, 1, 1), (4, 2, 1, 1)),
        ("conv", (2, 3, 3, 3), (4, 2, 3, 3)),
        ("point", (2, 5, 3, 3), (7, 2, 1, 1)),
        ("lin", (0, 6), (10, 0)),
        ("lin", (5000, 6), (10, 5000)),
    ],
    ids=str,
)
def test_wrong_shapes_name_the_module(tmp_path, module, down, up):
    """Factors that do not make the module's weight are refused with all three shapes."""
    tensors = {f"unet.{module}.lora_A.weight": torch.ones(down), f"unet.{module}.lora_B.weight": torch.ones(up)}
    message = refusal(tmp_path, tensors)
    assert f"unet.{module}" in message
    assert str(down) in message


@pytest.mark.parametrize(
    ("module", "down", "up"),
    [
        ("lin", (2, 6, 1, 1), (10, 2, 1, 1)),
        ("point", (2, 5), (7, 2)),
        ("point", (2, 5, 1, 1), (7, 2)),
        ("lin", (12, 6), (10, 12)),
    ],
    ids=str,
)
def test_pointwise_and_linear_stand_for_each_other(tmp_path, module, down, up):
    """proj_in is a 1x1 convolution in SD 1.x and a linear layer in SDXL; trainers mix them up, the product is one."""
    tensors = {f"unet.{module}.lora_A.weight": torch.ones(down), f"unet.{module}.lora_B.weight": torch.ones(up)}
    got = parse("x", write(tmp_path / "a.safetensors", tensors), UNET)
    assert got.factors[ModuleRef("unet", module)].plain[1].shape == down[:2]


@pytest.mark.parametrize(
    ("kind", "part", "missing"),
    [
        ("dora", "lora_down.weight", "down factor"),
        ("dora", "lora_up.weight", "up factor"),
        ("dora", "lora_", "down and no up factor"),
        ("loha", "hada_w1_a", "hada_w1_a"),
        ("loha", "hada_w2_b", "hada_w2_b"),
        ("lokr", "lokr_w1", "lokr_w1_a"),
        ("lokr", "lokr_w2_b", "lokr_w2_b"),
    ],
)
def test_a_missing_part_is_named(tmp_path, kind, part, missing):
    """A file that lacks a tensor is refused with what is missing, and what is there; an alpha alone is not ignored."""
    tensors = lycoris_tensors(TwoLayers(), kind)
    left = {key: value for key, value in tensors.items() if not key.startswith(f"lora_unet_lin.{part}")}
    message = refusal(tmp_path, left)
    assert f"unet.lin has no {missing}" in message
    assert "lora_unet_lin.alpha" in message


@pytest.mark.parametrize(
    ("kind", "part", "shape"),
    [
        ("loha", "hada_w1_a", (9, 2)),
        ("loha", "hada_w1_b", (3, 6)),
        ("loha", "hada_w2_b", (2,)),
        ("loha", "hada_t1", (2, 2, 3, 3)),
        ("lokr", "lokr_w1", (5, 2, 3)),
        ("lokr", "lokr_w2_b", (2, 0)),
        ("lokr", "lokr_w2", (5, 6)),
        ("dora", "dora_scale", (9, 1)),
        ("dora", "dora_scale", (10, 6)),
        ("loha", "lokr_w1", (5, 1)),
        ("lokr", "lora_down.weight", (2, 6)),
    ],
)
def test_a_part_that_does_not_fit_is_named(tmp_path, kind, part, shape):
    """A tensor of a wrong shape, one too many, or one of another kind is refused by its key."""
    key = f"lora_unet_lin.{part}"
    assert key in refusal(tmp_path, lycoris_tensors(TwoLayers(), kind) | {key: torch.ones(shape)})


def test_two_spellings_of_one_module_are_refused(tmp_path):
    """Which of two would win is a guess; none does."""
    made = factors({"lin": (10, 6)})
    unprefixed = {key.removeprefix("unet."): value for key, value in peft_tensors(made).items()}
    assert "both mean unet.lin" in refusal(tmp_path, {**peft_tensors(made), **unprefixed})
    other = factors({"conv": (4, 3, 3, 3)})
    assert "mixes kohya and PEFT" in refusal(tmp_path, {**peft_tensors(made), **kohya_tensors(other)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64], ids=str)
@pytest.mark.parametrize(("kind", "part"), [("dora", "lora_up.weight"), ("lokr", "lokr_w1")])
def test_other_dtypes_are_refused(tmp_path, kind, part, dtype):
    """Quantised or integer factors are not guessed at; the message names the key."""
    tensors, key = lycoris_tensors(TwoLayers(), kind), f"lora_unet_lin.{part}"
    tensors[key] = tensors[key].to(dtype)
    message = refusal(tmp_path, tensors)
    assert f"{key} is" in message
    assert "must be F16, BF16, F32 or F64" in message


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("dora", "lora_down.weight"),
        ("dora", "dora_scale"),
        ("loha", "hada_w2_a"),
        ("lokr", "lokr_w1"),
    ],
)
def test_what_is_not_finite_is_refused(tmp_path, kind, part, bad):
    """One NaN or infinity anywhere refuses the file and names the module."""
    tensors = lycoris_tensors(TwoLayers(), kind)
    tensors[f"lora_unet_conv.{part}"].view(-1)[1] = bad
    assert "unet.conv holds NaN or infinity" in refusal(tmp_path, tensors)


def test_a_dora_has_one_magnitude(tmp_path):
    """A file that says that it is a DoRA is not merged as if it were none."""
    tensors = peft_tensors(factors({"lin": (10, 6)}))
    assert "use_dora, but unet.lin has no magnitude" in refusal(tmp_path, tensors, peft_metadata(use_dora=True))
    both = {f"unet.lin.{part}": torch.ones(10) for part in ("lora_magnitude_vector", "dora_scale")}
    assert "both are its magnitude" in refusal(tmp_path, tensors | both)


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


def test_huge_but_finite_factors_parse(tmp_path):
    """Numbers whose squares overflow are not mistaken for infinity; the merge decides about them."""
    tensors = {"unet.lin.lora_A.weight": torch.full((1, 6), 1e30), "unet.lin.lora_B.weight": torch.full((10, 1), 1e-30)}
    factor = parse("x", write(tmp_path / "a.safetensors", tensors), UNET).factors[ModuleRef("unet", "lin")]
    assert factor.bound == math.inf


def test_files_that_are_empty_or_too_large_are_refused(tmp_path):
    """The container's cap reaches the caller with the LoRA's name."""
    assert "no tensors" in refusal(tmp_path, {})
    path = write(tmp_path / "a.safetensors", peft_tensors(factors({"lin": (10, 6)})))
    with pytest.raises(LoraError, match=r"LoRA 'big': .*largest allowed is 10"):
        parse("big", path, UNET, max_bytes=10)


def test_header_is_enough_to_refuse(tmp_path, monkeypatch):
    """A file of another model is refused before its data is read."""
    path = write(tmp_path / "a.safetensors", {"unet.other.lora_A.weight": torch.ones(2, 2)})
    read_header = container._read_header

    def and_close(file, max_bytes):
        header = read_header(file, max_bytes)
        file.close()  # who reads on gets a ValueError
        return header

    monkeypatch.setattr(container, "_read_header", and_close)
    with pytest.raises(LoraError, match="match nothing"):
        parse("x", path, UNET)


def test_metadata_of_text_encoders_knows_both_namings(tmp_path):
    """alpha_pattern written by an older transformers still means the same layer."""
    targets = LoraTargets.of({"text_encoder": flat_clip()})
    module = "text_model.encoder.layers.0.mlp.fc1"
    tensors = peft_tensors(factors({module: (6, 4)}), "text_encoder")
    metadata = {
        "lora_adapter_metadata": json.dumps({"text_encoder.lora_alpha": 2, "text_encoder.alpha_pattern": {module: 7}})
    }
    got = parse("x", write(tmp_path / "a.safetensors", tensors, metadata), targets)
    assert [factor.alpha for factor in got.factors.values()] == [7.0]
