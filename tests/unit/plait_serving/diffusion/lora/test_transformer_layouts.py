"""What trainers write for Stable Diffusion 3 and FLUX.1: the weights that merging by hand gives.

Keys are spelled by each tool's own rules. Where a tool trains the original model, the merge by hand is one of the
original weights (`support.original_flow`), which lay diffusers' modules one below the other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_xlabs_flux_lora_to_diffusers
from diffusers.loaders.single_file_utils import (
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_sd3_transformer_checkpoint_to_diffusers,
)

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora.key_formats import LoraFormat, format_of_keys
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.targets import LoraTargets, ModuleRef
from plait_serving.diffusion.published.architectures import ARCHITECTURES, FamilyName
from plait_serving.diffusion.published.configs import build_on_meta
from support.loras import A_B, DOWN_UP, factors, merged, small_parts, spelled, write
from support.original_flow import original_flux, original_sd3

torch.set_num_threads(1)

SD3, FLUX, LARGE = FamilyName.SD35_MEDIUM, FamilyName.FLUX_DEV, FamilyName.SD35_LARGE
ORIGINAL = {SD3: original_sd3, FLUX: original_flux}
SCALE = 0.7


class Model:
    """The transformer of a published architecture in small."""

    def __init__(self, name: FamilyName) -> None:
        self.name = name
        self.parts = small_parts(name, ("transformer",))
        self.targets = LoraTargets.of(self.parts)

    def original(self) -> dict[str, torch.Tensor]:
        """The transformer's weights under their original names."""
        return ORIGINAL[self.name](self.parts["transformer"].state_dict())


known = functools.cache(Model)


@pytest.fixture(params=[SD3, FLUX])
def model(request) -> Model:
    return known(request.param)


def linear(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """The linear layers among weights, with their shapes."""
    weights = {key: value for key, value in state.items() if key.endswith(".weight") and value.ndim == 2}
    return {key.removesuffix(".weight"): tuple(value.shape) for key, value in weights.items()}


def flat(name: str) -> str:
    return name.replace(".", "_")


def is_close(got: torch.Tensor, exact: torch.Tensor) -> bool:
    """Of a sum in float32 of numbers around 1."""
    return torch.allclose(got.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [SD3, FLUX])
def test_the_names_by_hand_are_those_that_diffusers_reads(name):
    """What every test here is held to: diffusers' converter makes the same weights of the original names again.

    Its numbers of rows are FLUX.1's own, so that has one column.
    """
    part = next(part for part in ARCHITECTURES[name].parts if part.folder == "transformer")
    few = {"num_layers": 3} | ({"num_single_layers": 2} if name is FLUX else {})
    outline = build_on_meta(replace(part, config={**part.config, **few})).state_dict()
    rng = torch.Generator().manual_seed(1)
    state = {
        key: torch.randn(len(value), *(1 for _ in value.shape[1:]), generator=rng) for key, value in outline.items()
    }
    if name is SD3:
        again = convert_sd3_transformer_checkpoint_to_diffusers(original_sd3(state))
    else:
        again = convert_flux_transformer_checkpoint_to_diffusers(original_flux(state))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], value) for key, value in state.items())


# ---- tools ----------------------------------------------------------------------------------------------------------

# Whether a tool trains the original model or diffusers', how a layer's name begins, whether its dots become
# underscores, how its factors are called, and alpha.
TOOLS = {
    "sd-scripts": (True, "lora_unet_", True, DOWN_UP, 3.0, LoraFormat.KOHYA),
    "ComfyUI": (True, "diffusion_model.", False, DOWN_UP, 3.0, LoraFormat.COMFYUI),
    "ai-toolkit": (True, "diffusion_model.", False, A_B, None, LoraFormat.COMFYUI),
    "PEFT": (True, "", False, ("lora_A.default.weight", "lora_B.default.weight"), None, LoraFormat.PEFT),
    "diffusers": (False, "transformer.", False, A_B, None, LoraFormat.PEFT),
    "ai-toolkit of diffusers": (False, "diffusion_model.", False, A_B, None, LoraFormat.COMFYUI),
    "OneTrainer": (False, "lora_transformer_", True, DOWN_UP, 3.0, LoraFormat.KOHYA),
    "SimpleTuner": (False, "lycoris_", True, DOWN_UP, 3.0, LoraFormat.SIMPLETUNER),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_all_layers_of_a_model(model, tool, tmp_path):
    """A file of all linear layers, the embedders' and modulations among them, changes each weight as its factors say,
    and no other. Of the original model queries, keys, values and feed-forward layers are one, and a final shift and
    scale are the other way round."""
    of_original, start, is_flat, ends, alpha, layout = TOOLS[tool]
    read = model.original if of_original else model.parts["transformer"].state_dict
    made = factors(linear(read()), rank=4)
    tensors = spelled({start + (flat(layer) if is_flat else layer): it for layer, it in made.items()}, ends, alpha)
    lora = parse("a", write(tmp_path / "a.safetensors", tensors), model.targets)
    assert format_of_keys(tensors) == layout.value
    exact = {key: value.double() for key, value in read().items()}
    for layer, factor in made.items():
        exact[f"{layer}.weight"] += SCALE * (alpha or 4) / 4 * factor.up.double() @ factor.down.double()
    after = merged(model.parts, lora, SCALE, read)
    assert [key for key, value in exact.items() if not is_close(after[key], value)] == []


def test_a_layer_that_a_trainer_has_split_costs_what_it_cost_there(model, tmp_path):
    """`split_qkv` of sd-scripts gives each part ranks of its own in one file, of which the others have zeros: the same
    weights, and each part has its ranks only. Where all share one factor, it stays one."""
    layer = {SD3: "joint_blocks.0.x_block.attn.qkv", FLUX: "single_blocks.1.linear1"}[model.name]
    parts = model.targets.joined[ModuleRef("transformer", layer)]
    heights = [model.targets.shapes[part][0] for part in parts]
    width = linear(model.original())[layer][1]
    pairs = [factors({"it": (height, width)}, rank=3, seed=i)["it"] for i, height in enumerate(heights)]
    down, up = torch.cat([pair.down for pair in pairs]), torch.block_diag(*(pair.up for pair in pairs))
    stem, alpha = f"lora_unet_{flat(layer)}", 5.0
    tensors = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up, f"{stem}.alpha": torch.tensor(alpha)}
    lora = parse("a", write(tmp_path / "a.safetensors", tensors), model.targets)
    assert {ref: factor.rank for ref, factor in lora.factors.items()} == dict.fromkeys(parts, 3)
    exact = model.original()[f"{layer}.weight"].double() + SCALE * alpha / len(down) * up.double() @ down.double()
    assert is_close(merged(model.parts, lora, SCALE, model.original)[f"{layer}.weight"], exact)

    tensors[f"{stem}.lora_up.weight"] = torch.ones_like(up)
    shared = parse("b", write(tmp_path / "b.safetensors", tensors), model.targets)
    assert len({factor.first.right.data_ptr() for factor in shared.factors.values()}) == 1


def drawn(kind: str, weight: torch.Tensor, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer's tensors as LyCORIS has them, with alpha 1 and ranks of 2, and what becomes of its weight."""
    rng = torch.Generator().manual_seed(seed)
    rows, columns = weight.shape
    draw = functools.partial(torch.randn, generator=rng)
    if kind == "loha":
        made = {
            f"hada_w{i}_{side}": draw(*shape) for i in (1, 2) for side, shape in (("a", (rows, 2)), ("b", (2, columns)))
        }
        product = (made["hada_w1_a"] @ made["hada_w1_b"]) * (made["hada_w2_a"] @ made["hada_w2_b"])
    elif kind == "lokr":
        upper = next(n for n in (8, 7, 5, 4, 2, 1) if rows % n == 0)  # no multiple of what cuts the rows
        made = {"lokr_w1": draw(upper, 2), "lokr_w2_a": draw(rows // upper, 2), "lokr_w2_b": draw(2, columns // 2)}
        product = torch.kron(made["lokr_w1"], made["lokr_w2_a"] @ made["lokr_w2_b"])
    else:
        made = {"lora_down.weight": draw(2, columns), "lora_up.weight": draw(rows, 2)}
        product = made["lora_up.weight"] @ made["lora_down.weight"]
    exact = weight.double() + SCALE / 2 * product.double()
    if kind == "dora":
        made["dora_scale"] = weight.norm(dim=1, keepdim=True) * (1 + 0.3 * draw(rows, 1))
        exact *= made["dora_scale"].double() / exact.norm(dim=1, keepdim=True)
    return {**made, "alpha": torch.tensor(1.0)}, exact


@pytest.mark.parametrize("kind", ["loha", "lokr", "dora"])
def test_lycoris_of_the_original_model(model, kind, tmp_path):
    """LoHa, LoKr and DoRA of whole layers are cut where diffusers cuts the layers, whatever their matrices are."""
    tensors, exact = {}, {key: value.double() for key, value in model.original().items()}
    for seed, layer in enumerate(linear(model.original())):
        made, exact[f"{layer}.weight"] = drawn(kind, model.original()[f"{layer}.weight"], seed)
        tensors |= {f"lora_unet_{flat(layer)}.{part}": value for part, value in made.items()}
    lora = parse("a", write(tmp_path / "a.safetensors", tensors), model.targets)
    after = merged(model.parts, lora, SCALE, model.original)
    assert [key for key, value in exact.items() if not is_close(after[key], value)] == []
    if kind != "dora":
        for factor in lora.factors.values():
            down, up = factor.pair()
            assert torch.allclose(up @ down, factor.product(torch.empty(0)), atol=1e-5)


def test_biases_of_whole_layers(model, tmp_path):
    """A difference of a bias is cut and turned round as the weight is."""
    biases = {
        key: value for key, value in model.original().items() if key.endswith(".bias") and "x_embedder" not in key
    }
    changes = {
        key: torch.full_like(value, i / 8) + torch.arange(len(value)) for i, (key, value) in enumerate(biases.items())
    }
    tensors = {f"diffusion_model.{key.removesuffix('.bias')}.diff_b": change for key, change in changes.items()}
    lora = parse("a", write(tmp_path / "a.safetensors", tensors), model.targets)
    after = merged(model.parts, lora, SCALE, model.original)
    assert all(is_close(after[key], value.double() + SCALE * changes[key].double()) for key, value in biases.items())


def test_a_file_of_fals_trainer_of_kontext(tmp_path):
    """The original blocks' names behind PEFT's prefix: what they mean without it, and the rank is alpha."""
    model, blocks = known(FLUX), ("double_blocks.", "single_blocks.", "final_layer.linear")
    made = factors({layer: shape for layer, shape in linear(model.original()).items() if layer.startswith(blocks)})
    fal, plain = (
        parse(
            "a",
            write(tmp_path / "a.safetensors", spelled({start + at: it for at, it in made.items()}, A_B)),
            model.targets,
        )
        for start in ("base_model.model.", "diffusion_model.")
    )
    assert fal.factors.keys() == plain.factors.keys()
    for ref, factor in plain.factors.items():
        mine = fal.factors[ref]
        assert torch.equal(mine.product(torch.empty(0)), factor.product(torch.empty(0)))
        assert mine.alpha / mine.rank == factor.alpha / factor.rank == 1.0


# ---- XLabs, and diffusers' reading of it ----------------------------------------------------------------------------


@functools.cache
def whole_flux() -> LoraTargets:
    """What LoRAs may change in FLUX.1 itself, of which diffusers' converters know the sizes."""
    parts = {part.folder: part for part in ARCHITECTURES[FLUX].parts}
    return LoraTargets.of({"transformer": build_on_meta(parts["transformer"])})


WIDE = 3072
XLABS = {
    "double_blocks.18.processor.qkv_lora1": (3 * WIDE, WIDE),
    "double_blocks.18.processor.qkv_lora2": (3 * WIDE, WIDE),
    "double_blocks.18.processor.proj_lora1": (WIDE, WIDE),
    "double_blocks.18.processor.proj_lora2": (WIDE, WIDE),
    "single_blocks.0.processor.qkv_lora": (3 * WIDE, WIDE),
    "single_blocks.0.processor.proj_lora": (WIDE, 5 * WIDE),
}


def test_xlabs_files_mean_what_diffusers_makes_of_them(tmp_path):
    """At FLUX.1's own sizes each module's product is that of diffusers' converter."""
    tensors = spelled(factors(XLABS, rank=4), ("down.weight", "up.weight"))
    lora = parse("a", write(tmp_path / "a.safetensors", tensors), whole_flux())
    assert format_of_keys(tensors) == LoraFormat.XLABS.value
    wanted = _convert_xlabs_flux_lora_to_diffusers(dict(tensors))
    made = {key.split(".lora_A")[0]: key for key in wanted if key.endswith(".lora_A.weight")}
    names = {str(ref): factor for ref, factor in lora.factors.items()}
    assert made.keys() == names.keys()
    for module, key in made.items():
        factor = names[module]
        up, down = factor.plain
        vector = torch.linspace(-1, 1, down.shape[1], dtype=torch.float64)
        exact = wanted[key.replace("lora_A", "lora_B")].double() @ (wanted[key].double() @ vector)
        got = factor.alpha / factor.rank * up.double() @ (down.double() @ vector)
        assert torch.allclose(got, exact, rtol=1e-5, atol=1e-5), module


# ---- what is refused ------------------------------------------------------------------------------------------------


def refusal(tensors: Mapping[str, torch.Tensor], targets: LoraTargets, folder) -> str:
    with pytest.raises(LoraError) as raised:
        parse("mine", write(folder / "mine.safetensors", tensors), targets)
    return raised.value.message


def both(stem: str, rows: int = 8, columns: int = 8) -> dict[str, torch.Tensor]:
    return {f"{stem}.lora_down.weight": torch.ones(2, columns), f"{stem}.lora_up.weight": torch.ones(rows, 2)}


@functools.cache
def unet() -> LoraTargets:
    return LoraTargets.of(small_parts(FamilyName.SDXL, ("unet",)))


QKV = {SD3: "joint_blocks.0.x_block.attn.qkv", FLUX: "double_blocks.0.img_attn.qkv"}


@pytest.mark.parametrize(
    ("name", "stem", "says"),
    [
        (FLUX, "lora_unet_no_such_layer", "2 of 2 keys match nothing in this model"),
        (FLUX, "lora_unet_double_blocks_99_img_attn_proj", "the nearest layout is that of kohya"),
        (FLUX, "lora_unet_down_blocks_0_attentions_0_proj_in", "the file is for Stable Diffusion 1, 2 or XL"),
        (FLUX, "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj", "the file is for FLUX.2"),
        (FLUX, "diffusion_model.layers.0.attention.to_q", "the file is for Z-Image"),
        (SD3, "transformer.single_transformer_blocks.0.attn.to_q", "the file is for FLUX.1"),
        (LARGE, "transformer.transformer_blocks.0.attn2.to_q", "the file is for Stable Diffusion 3.5 Medium"),
        (SD3, "transformer.transformer_blocks.0.img_mlp.net.2", "the file is for Qwen-Image"),
        (FLUX, "lora_te2_encoder_block_0_layer_0_SelfAttention_q", "a LoRA with a part for T5, which stays as it is"),
        (None, "transformer.transformer_blocks.0.attn.to_q", "for a transformer, as Stable Diffusion 3 and FLUX.1 are"),
        (None, "lora_unet_double_blocks_0_img_attn_qkv", "the file is for FLUX.1"),
        (None, "lora_unet_joint_blocks_0_x_block_attn_qkv", "the file is for Stable Diffusion 3"),
    ],
)
def test_what_matches_nothing_is_an_error(name, stem, says, tmp_path):
    """It names the first key, and the model that the file is for where the names tell it. No name: a UNet."""
    message = refusal(both(stem), unet() if name is None else known(name).targets, tmp_path)
    assert says in message
    assert f"{stem}.lora_down.weight" in message


def test_a_control_lora_is_refused_by_name(tmp_path):
    """Black Forest Labs' has norms of its own and biases; one that diffusers saved has a wider input."""
    norms = {"double_blocks.0.img_attn.norm.query_norm.scale": torch.ones(16)}
    biased = {"double_blocks.0.img_attn.proj.lora_B.bias": torch.ones(32)}
    assert "a control LoRA (FLUX.1 Canny or Depth)" in refusal({**biased, **norms}, known(FLUX).targets, tmp_path)
    wider = both("transformer.x_embedder", rows=32, columns=128)
    assert "for FLUX.1 Canny or Depth, a control LoRA" in refusal(wider, known(FLUX).targets, tmp_path)


def test_equal_names_of_another_width_say_whose_they_are(tmp_path):
    """Attention layers of SD3 and FLUX.1 have the same names, and widths that tell them apart."""
    of_sd3 = both("transformer.transformer_blocks.0.attn.to_q", rows=1536, columns=1536)
    assert "the file is for Stable Diffusion 3 Medium or 3.5 Medium" in refusal(of_sd3, whole_flux(), tmp_path)


def test_a_part_and_its_whole_are_two_meanings(model, tmp_path):
    """A file that changes queries alone and in the layer that has them all is refused, naming both keys."""
    alone = both("lora_unet_transformer_blocks_0_attn_to_q", 32, 32)
    message = refusal({**both(f"lora_unet_{flat(QKV[model.name])}", 96, 32), **alone}, model.targets, tmp_path)
    assert "both mean transformer.transformer_blocks.0.attn.to_q" in message


def test_norms_by_input_of_a_whole_layer_are_refused(model, tmp_path):
    """A DoRA with a norm for each input spans modules that are several here."""
    stem = f"lora_unet_{flat(QKV[model.name])}"
    tensors = both(stem, 96, 32) | {f"{stem}.dora_scale": torch.ones(1, 32)}
    assert "a norm for each input, of a layer that is several here" in refusal(tensors, model.targets, tmp_path)
