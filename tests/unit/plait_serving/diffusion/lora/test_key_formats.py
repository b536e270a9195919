"""What ComfyUI, OneTrainer, SimpleTuner and PEFT write: the tensors of diffusers' layout, bit for bit.

The keys are spelled here by each tool's own rules, from the names of the original UNet (`support.ldm`).
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

from plait_kernels.executors import AdaptedLayer
from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.families.factors import FactorStore
from plait_serving.diffusion.lora.key_formats import LoraFormat, format_of_keys
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.published.architectures import FamilyName
from plait_serving.diffusion.published.configs import published_name
from support.ldm import original_names
from support.loras import (
    A_B,
    DOWN_UP,
    TwoLayers,
    delta,
    factors,
    merged,
    peft_tensors,
    shapes_of,
    small_parts,
    snapshot,
    spelled,
    write,
)

torch.set_num_threads(1)

ENCODERS = {
    FamilyName.SD15: {"text_encoder": "clip_l"},
    FamilyName.SD21: {"text_encoder": "clip_h"},
    FamilyName.SDXL: {"text_encoder": "clip_l", "text_encoder_2": "clip_g"},
}


class Family:
    """The parts of a published architecture in small, and the original names of the UNet's parameters."""

    def __init__(self, name: FamilyName) -> None:
        self.clips = ENCODERS[name]
        self.parts = small_parts(name, {"unet", *self.clips})
        unet = self.parts["unet"]
        self.original = original_names(unet.state_dict(), unet.config["layers_per_block"])
        self.targets = LoraTargets.of(self.parts)

    def layers(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """The shapes of all layers that trainers choose, by component and path."""
        return {
            (component, path): tuple(module.weight.shape)
            for component, root in self.parts.items()
            for path, module in root.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d)
        }

    def ldm(self, path: str) -> str:
        """The original name of a UNet's module."""
        return self.original[f"{path}.weight"].removesuffix(".weight")


known = functools.cache(Family)


@pytest.fixture(params=list(ENCODERS))
def family(request) -> Family:
    return known(request.param)


def comfyui(family: Family, component: str, path: str) -> str:
    """`LoraSave`: the names in ComfyUI's own models, CLIP's as transformers 4 has them."""
    if component == "unet":
        return f"diffusion_model.{family.ldm(path)}"
    return f"text_encoders.{family.clips[component]}.transformer.{published_name(path)}"


def onetrainer(family: Family, component: str, path: str) -> str:
    """OneTrainer: the same names under prefixes of its own; SD 2's encoder is `clip_l` as well."""
    if component == "unet":
        return f"unet.{family.ldm(path)}"
    return f"{'clip_g' if component == 'text_encoder_2' else 'clip_l'}.{published_name(path)}"


def diffusers(family: Family, component: str, path: str) -> str:
    return f"{component}.{path}"


# Whether a tool knows UNets alone, how it spells a layer, how its factors are called, and alpha.
TOOLS = {
    "LoraSave": (False, comfyui, DOWN_UP, None, LoraFormat.COMFYUI),
    "OneTrainer for ComfyUI": (False, comfyui, A_B, 1.0, LoraFormat.COMFYUI),
    "OneTrainer": (False, onetrainer, DOWN_UP, 1.0, LoraFormat.ONETRAINER),
    "OneTrainer, original": (True, lambda family, _, path: family.ldm(path), A_B, 1.0, LoraFormat.ONETRAINER),
    "SimpleTuner": (True, lambda *at: f"lycoris_{at[2].replace('.', '_')}", DOWN_UP, 1.0, LoraFormat.SIMPLETUNER),
    "an adapter's name": (
        False,
        diffusers,
        ("lora_A.my-style_2.weight", "lora_B.my-style_2.weight"),
        None,
        LoraFormat.PEFT,
    ),
    "bare": (False, diffusers, ("lora_A", "lora_B"), None, LoraFormat.PEFT),
}


# Tools differ by their prefixes, and models by their blocks and encoders: all of the ones and all of the others.
@pytest.mark.parametrize(
    ("name", "tool"),
    [
        (name, tool)
        for name in ENCODERS
        for tool in TOOLS
        if name is FamilyName.SDXL or tool in ("LoraSave", "OneTrainer")
    ],
)
def test_a_renaming_changes_no_bit(name, tool, tmp_path):
    """Each tool's file of all layers gives the factors and alphas of diffusers' layout, bit for bit."""
    family = known(name)
    of_unets, spell, ends, alpha, layout = TOOLS[tool]
    made = factors({at: shape for at, shape in family.layers().items() if at[0] == "unet" or not of_unets})
    theirs = spelled({spell(family, *at): it for at, it in made.items()}, ends, alpha)
    ours = spelled({diffusers(family, *at): it for at, it in made.items()}, A_B, alpha)
    got = parse("a", write(tmp_path / "a.safetensors", theirs, dtype=torch.float16), family.targets)
    wanted = parse("b", write(tmp_path / "b.safetensors", ours, dtype=torch.float16), family.targets)
    assert format_of_keys(theirs) == layout.value
    assert got.factors.keys() == wanted.factors.keys()
    assert len(got.factors) == len(made)
    for ref, factor in wanted.factors.items():
        mine = got.factors[ref]
        assert all(map(torch.equal, mine.plain, factor.plain))
        assert (mine.alpha, mine.rank) == (factor.alpha, factor.rank)


TWO = LoraTargets.of({"unet": TwoLayers()})


# ---- what LoraSave writes by default --------------------------------------------------------------------------------


def lora_save(family: Family, *, full: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """`LoraSave` of the difference of two models, in float32 and at a rank that loses nothing: factors of all weights
    of two dimensions and more, differences of all others and of biases (`full`: of all weights). And what each
    parameter is moved by."""
    rng = torch.Generator().manual_seed(5)
    changes = {key: 0.1 * torch.randn(value.shape, generator=rng) for key, value in snapshot(family.parts).items()}
    tensors = beyond(family)
    for key, change in changes.items():
        component, _, path = key.partition(".")
        module, _, parameter = path.rpartition(".")
        stem = comfyui(family, component, module)
        if parameter == "bias":
            tensors[f"{stem}.diff_b"] = change
        elif full or change.ndim == 1:
            tensors[f"{stem}.diff"] = change
        else:
            (factor,) = factors({"it": tuple(change.shape)}).values()
            tensors |= spelled({stem: factor}, DOWN_UP)
            changes[key] = delta(factor, tuple(change.shape)).float()
    return tensors, changes


def beyond(family: Family, up: float = 0.0) -> dict[str, torch.Tensor]:
    """What ComfyUI's text encoders have and the model has not: CLIP-L's projection; OpenCLIP-H's last layer."""
    if family.clips["text_encoder"] == "clip_l":
        stem, bias = "text_encoders.clip_l.transformer.text_projection", {}
    else:
        stem = "text_encoders.clip_h.transformer.text_model.encoder.layers.23.mlp.fc1"
        bias = {f"{stem}.diff_b": torch.full((8,), up)}
    return {f"{stem}.lora_up.weight": torch.full((8, 2), up), f"{stem}.lora_down.weight": torch.ones(2, 8), **bias}


@pytest.mark.parametrize(("full", "scale"), [(False, 0.6), (True, -1.3)], ids=["standard", "full_diff"])
def test_a_difference_of_two_models(family, full, scale, tmp_path):
    """A default file of `LoraSave` moves every weight, bias, norm and embedding by scale times what it was made of."""
    tensors, changes = lora_save(family, full=full)
    lora = parse("a", write(tmp_path / "a.safetensors", tensors), family.targets)
    after = merged(family.parts, lora, scale)
    for key, was in snapshot(family.parts).items():
        exact = (was.double() + scale * changes[key].double()).float()
        assert torch.allclose(after[key], exact, atol=3e-6), key
        assert not torch.equal(after[key], was), key


def test_a_bias_is_no_input_of_a_step(tmp_path):
    """A file with biases is merged into the weights, though its factors alone would be inputs."""
    tensors = peft_tensors(factors({"lin": (10, 6)}))
    store = FactorStore("unet", [AdaptedLayer(path="unet.lin", width_in=6, width_out=10)])
    alone = parse("a", write(tmp_path / "a.safetensors", tensors), TWO)
    biased = tensors | {"unet.lin.diff_b": torch.ones(10)}
    assert store.takes(alone)
    assert not store.takes(parse("b", write(tmp_path / "b.safetensors", biased), TWO))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("unet.lin.diff_b", torch.ones(9), r"unet\.lin\.diff_b has the shape \(9,\), but unet\.lin\.bias has \(10,\)"),
        ("unet.conv.diff", torch.ones(4, 27), r"unet\.conv\.diff has the shape"),
        ("unet.norm.diff", torch.ones(6, 1), r"unet\.norm\.diff has the shape"),
        ("unet.nobody.diff_b", torch.ones(10), r"match nothing.*unet\.nobody\.diff_b"),
        ("unet.lin.diff", torch.ones(10, 6), "two kinds"),
        ("unet.lin.diff_b", torch.full((10,), math.nan), r"unet\.lin\.bias holds NaN or infinity"),
    ],
)
def test_a_difference_that_does_not_fit_is_named(tmp_path, key, value, sentence):
    """One of another shape, of a layer that is not there, beside factors of the same weight, or that is not finite."""
    path = write(tmp_path / "a.safetensors", peft_tensors(factors({"lin": (10, 6)})) | {key: value})
    with pytest.raises(LoraError, match=sentence):
        parse("a", path, TWO)


def test_a_layer_that_is_not_there_may_only_add_zeros(family, tmp_path):
    """What ComfyUI's text encoders have beyond the model's is left out if it adds nothing, and else refused."""
    shape = tuple(family.parts["unet"].conv_in.weight.shape)
    tensors = peft_tensors(factors({family.ldm("conv_in"): shape}), "diffusion_model")
    parse("a", write(tmp_path / "a.safetensors", tensors | beyond(family)), family.targets)
    with pytest.raises(LoraError, match=r"match nothing in this model .*text_encoders\.clip_[lh]\.transformer"):
        parse("b", write(tmp_path / "b.safetensors", tensors | beyond(family, up=0.1)), family.targets)
    with pytest.raises(LoraError, match="match nothing"):
        parse("c", write(tmp_path / "c.safetensors", beyond(family)), family.targets)


# ---- messages -------------------------------------------------------------------------------------------------------


def test_bundled_embeddings_are_left_out_and_told_once(tmp_path, caplog):
    """A LoRA with `bundle_emb.*` is read as without it; the log says once that the embeddings are not used. Alone they
    are no LoRA."""
    tensors = peft_tensors(factors(shapes_of(TwoLayers())))
    bundled = {
        "bundle_emb.<my\ncat>.clip_l": torch.ones(4, 768),
        "bundle_emb.<my\ncat>.clip_g": torch.ones(4, 1280),
        "bundle_emb.dog.clip_l_out": torch.ones(1, 768),
    }
    path = write(tmp_path / "a.safetensors", tensors | bundled)
    got = [parse("with-embeddings", path, TWO) for _ in range(2)]
    wanted = parse("without", write(tmp_path / "b.safetensors", tensors), TWO)
    [told] = [record.getMessage() for record in caplog.records]
    assert "'with-embeddings'" in told
    assert "'dog'" in told
    assert "\n" not in told
    assert got[1].factors.keys() == wanted.factors.keys()
    with pytest.raises(LoraError, match="textual inversion"):
        parse("a", write(tmp_path / "c.safetensors", bundled), TWO)


@pytest.mark.parametrize(
    ("stem", "layout"),
    [
        ("unet.down_blocks.7.resnets.0.conv1", "PEFT (diffusers)"),
        ("text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q", "ComfyUI"),
        ("unet.input_blocks.77.0.in_layers.2", "OneTrainer"),
        ("lycoris_down_blocks_7_resnets_0_conv1", "SimpleTuner (LyCORIS)"),
    ],
)
def test_unknown_keys_name_the_nearest_layout(stem, layout, tmp_path):
    """The message counts the keys, names the layout that they are most like, and shows three of them."""
    tensors = {f"{stem}.{i}.lora_down.weight": torch.ones(2, 2) for i in range(444)}
    with pytest.raises(LoraError) as caught:
        parse("mine", write(tmp_path / "a.safetensors", tensors), known(FamilyName.SD15).targets)
    assert "444 of 444 keys match nothing" in caught.value.message
    assert f"the nearest layout is that of {layout})" in caught.value.message
    assert f": {', '.join(sorted(tensors)[:3])} and 441 more" in caught.value.message


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["lora_te_text_model.lora_up.weight"], "kohya"),
        (["base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"], "peft"),
        (["unet.down_blocks.0.attn1.processor.to_q_lora.lora.down.weight"], "peft"),
        (["text_encoders.clip_l.transformer.text_model.final_layer_norm.diff"], "comfyui"),
        (["bundle_emb.dog.clip_l", "clip_l.text_model.encoder.layers.0.mlp.fc1.hada_w1_a"], "onetrainer"),
        (["lycoris_mid_block_resnets_0_conv1.lokr_w1"], "simpletuner"),
        (["model.diffusion_model.out.0.weight"], "unknown"),
        (["bundle_emb.dog.clip_l"], "unknown"),
    ],
)
def test_a_loras_format_is_told_by_its_names(names, kind):
    """Listings tell layouts apart by the names alone; what is no LoRA is unknown."""
    assert format_of_keys([*names, "__metadata__"]) == kind
