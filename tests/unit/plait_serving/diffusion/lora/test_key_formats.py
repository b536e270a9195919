"""What ComfyUI, OneTrainer, SimpleTuner and PEFT write: the tensors of diffusers' layout, bit for bit.

The keys are spelled here by each tool's own rules, from the names of the original UNet (`support.ldm`).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

from plait_kernels.executors import AdaptedLayer
from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.families.factors import FactorStore
from plait_serving.diffusion.lora.key_formats import LoraFormat, format_of_keys
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.published.architectures import FamilyName
from plait_serving.diffusion.published.configs import build_on_meta, published_name
from plait_serving.diffusion.published.scaled import scaled_down
from plait_serving.diffusion.values import LoraRef
from support.ldm import original_names
from support.loras import TwoLayers, factors, lycoris_tensors, peft_tensors, shapes_of, snapshot, write

torch.set_num_threads(1)

ENCODERS = {
    FamilyName.SD15: {"text_encoder": "clip_l"},
    FamilyName.SD21: {"text_encoder": "clip_h"},
    FamilyName.SDXL: {"text_encoder": "clip_l", "text_encoder_2": "clip_g"},
}
NORMS = (nn.GroupNorm, nn.LayerNorm)


class Family:
    """The parts of a published architecture in small, and the original names of the UNet's parameters."""

    def __init__(self, name: FamilyName) -> None:
        self.clips = ENCODERS[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.parts = {
                part.folder: filled(build_on_meta(part))
                for part in scaled_down(name).parts
                if part.folder in {"unet", *self.clips}
            }
        unet = self.parts["unet"]
        self.original = original_names(unet.state_dict(), unet.config["layers_per_block"])
        self.targets = LoraTargets.of(self.parts)

    def layers(self, *, embeddings: bool = False) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Component, path and shape of every layer that trainers choose."""
        kinds = (nn.Linear, nn.Conv2d, nn.Embedding) if embeddings else (nn.Linear, nn.Conv2d)
        for component, root in self.parts.items():
            for path, module in root.named_modules():
                if isinstance(module, kinds):
                    yield component, path, tuple(module.weight.shape)

    def ldm(self, path: str) -> str:
        """The original name of a UNet's module."""
        return self.original[f"{path}.weight"].removesuffix(".weight")


def filled(module: nn.Module) -> nn.Module:
    """A module without weights, with random ones."""
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.1)
    return module


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


def onetrainer_original(family: Family, component: str, path: str) -> str:
    """OneTrainer's "original" output, of a UNet alone."""
    return family.ldm(path)


def simpletuner(family: Family, component: str, path: str) -> str:
    """SimpleTuner with LyCORIS, which knows no text encoders: the wrapper's prefix, and underscores."""
    return f"lycoris_{path.replace('.', '_')}"


def plain(family: Family, component: str, path: str) -> str:
    """diffusers."""
    return f"{component}.{path}"


TOOLS = {
    "LoraSave": (comfyui, "lora_down.weight", "lora_up.weight", False, LoraFormat.COMFYUI),
    "OneTrainer for ComfyUI": (comfyui, "lora_A.weight", "lora_B.weight", True, LoraFormat.COMFYUI),
    "OneTrainer": (onetrainer, "lora_down.weight", "lora_up.weight", True, LoraFormat.ONETRAINER),
    "OneTrainer, original": (onetrainer_original, "lora_A.weight", "lora_B.weight", True, LoraFormat.ONETRAINER),
    "SimpleTuner": (simpletuner, "lora_down.weight", "lora_up.weight", True, LoraFormat.SIMPLETUNER),
    "an adapter's name": (plain, "lora_A.my-style_2.weight", "lora_B.my-style_2.weight", False, LoraFormat.PEFT),
    "bare": (plain, "lora_A", "lora_B", False, LoraFormat.PEFT),
}
OF_UNETS = {simpletuner, onetrainer_original}


def pair(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random factors of rank 2, in float16 as files have them."""
    made = factors({"it": shape}, seed=seed)["it"]
    return made.down.half(), made.up.half()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_renaming_changes_no_bit(family, tool, tmp_path):
    """Each tool's file of all layers gives the factors and alphas of diffusers' layout, bit for bit."""
    spell, down_key, up_key, has_alpha, layout = TOOLS[tool]
    theirs, diffusers = {}, {}
    for seed, (component, path, shape) in enumerate(family.layers()):
        if spell in OF_UNETS and component != "unet":
            continue
        down, up = pair(shape, seed)
        stem = spell(family, component, path)
        theirs |= {f"{stem}.{down_key}": down, f"{stem}.{up_key}": up}
        diffusers |= {f"{component}.{path}.lora_A.weight": down, f"{component}.{path}.lora_B.weight": up}
        if has_alpha:
            theirs[f"{stem}.alpha"] = diffusers[f"{component}.{path}.alpha"] = torch.tensor(1.0)
    got = parse("a", write(tmp_path / "a.safetensors", theirs), family.targets)
    wanted = parse("b", write(tmp_path / "b.safetensors", diffusers), family.targets)
    assert got.format is layout
    assert len(wanted.factors) == len(theirs) / (3 if has_alpha else 2)
    assert got.factors.keys() == wanted.factors.keys()
    for ref, factor in wanted.factors.items():
        mine = got.factors[ref]
        assert torch.equal(mine.down, factor.down)
        assert torch.equal(mine.up, factor.up)
        assert (mine.alpha, mine.rank) == (factor.alpha, factor.rank)


@pytest.mark.parametrize("kind", ["loha", "lokr", "dora"])
def test_lycoris_of_simpletuner(kind, tmp_path):
    """LoHa, LoKr and DoRA under `lycoris_` make the weights that they make under `lora_unet_`."""
    tensors = lycoris_tensors(TwoLayers(), kind)
    renamed = {key.replace("lora_unet_", "lycoris_"): value for key, value in tensors.items()}
    files = [write(tmp_path / f"{i}.safetensors", each) for i, each in enumerate((tensors, renamed))]
    made = [merged({"unet": TwoLayers()}, parse("x", file, targets_of_two()), 0.7) for file in files]
    assert all(torch.equal(value, made[1][key]) for key, value in made[0].items())


# ---- what LoraSave writes by default --------------------------------------------------------------------------------


def targets_of_two() -> LoraTargets:
    return LoraTargets.of({"unet": TwoLayers()})


def merged(parts: Mapping[str, nn.Module], lora: LoadedLora, scale: float) -> dict[str, torch.Tensor]:
    """All parameters with the LoRA in them; checks that a restore leaves no trace."""
    before, merger = snapshot(parts), Merger(parts)
    merger.switch((LoraRef(name=lora.name, scale=scale),), {lora.name: lora})
    after = snapshot(parts)
    merger.switch((), {})
    assert all(torch.equal(value, before[key]) for key, value in snapshot(parts).items())
    return after


def lora_save(family: Family, changes: Mapping[str, torch.Tensor], *, full: bool = False) -> dict[str, torch.Tensor]:
    """`LoraSave` of the difference of two models, in float32 and at a rank that loses nothing: factors of all weights
    of two dimensions and more, differences of all others and of biases (`full`: of all weights)."""
    tensors = {}
    for component, root in family.parts.items():
        for path, module in root.named_modules():
            if not isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding | nn.GroupNorm | nn.LayerNorm):
                continue
            stem = comfyui(family, component, path)
            change = changes[f"{component}.{path}.weight"]
            if full or isinstance(module, NORMS):
                tensors[f"{stem}.diff"] = change
            else:
                u, s, v = torch.linalg.svd(change.flatten(1), full_matrices=False)
                tensors[f"{stem}.lora_up.weight"] = (u * s).reshape(len(change), -1, *[1] * (change.ndim - 2))
                tensors[f"{stem}.lora_down.weight"] = v.reshape(-1, *change.shape[1:])
            if getattr(module, "bias", None) is not None:
                tensors[f"{stem}.diff_b"] = changes[f"{component}.{path}.bias"]
    return tensors | beyond(family)


def beyond(family: Family, up: float = 0.0) -> dict[str, torch.Tensor]:
    """What ComfyUI's text encoders have and the model has not: CLIP-L's projection; OpenCLIP-H's last layer."""
    name, absent = {
        "clip_l": ("clip_l.transformer.text_projection", "clip_l"),
        "clip_h": ("clip_h.transformer.text_model.encoder.layers.23.mlp.fc1", "clip_h"),
    }[family.clips["text_encoder"]]
    stem = f"text_encoders.{name}"
    made = {f"{stem}.lora_up.weight": torch.full((8, 2), up), f"{stem}.lora_down.weight": torch.ones(2, 8)}
    return made if absent == "clip_l" else made | {f"{stem}.diff_b": torch.full((8,), up)}


def random_changes(family: Family) -> dict[str, torch.Tensor]:
    """What every parameter is moved by."""
    rng = torch.Generator().manual_seed(5)
    return {key: 0.1 * torch.randn(value.shape, generator=rng) for key, value in snapshot(family.parts).items()}


@pytest.mark.parametrize(("full", "scale"), [(False, 0.6), (True, -1.3)], ids=["standard", "full_diff"])
def test_a_difference_of_two_models(family, full, scale, tmp_path):
    """A default file of `LoraSave` moves every weight, bias, norm and embedding by scale times what it was made of."""
    changes = random_changes(family)
    path = write(tmp_path / "a.safetensors", lora_save(family, changes, full=full))
    after = merged(family.parts, parse("a", path, family.targets), scale)
    for key, was in snapshot(family.parts).items():
        exact = (was.double() + scale * changes[key].double()).float()
        assert torch.allclose(after[key], exact, atol=3e-6), key
        assert not torch.equal(after[key], was), key


def test_a_bias_is_moved_exactly(tmp_path):
    """`.diff_b` is added at the LoRA's scale, in float32 and rounded once."""
    change = torch.randn(10, generator=torch.Generator().manual_seed(3))
    path = write(tmp_path / "a.safetensors", {"lora_unet_lin.diff_b": change})
    for dtype in (torch.float32, torch.bfloat16):
        parts = {"unet": TwoLayers(dtype)}
        after = merged(parts, parse("a", path, LoraTargets.of(parts)), 0.7)
        assert torch.equal(after["unet.lin.bias"], (parts["unet"].lin.bias.float() + 0.7 * change).to(dtype))


def test_a_bias_is_no_input_of_a_step(tmp_path):
    """A file with biases is merged into the weights, though its factors alone would be inputs."""
    tensors = peft_tensors(factors({"lin": (10, 6)}))
    store = FactorStore("unet", [AdaptedLayer(path="unet.lin", width_in=6, width_out=10)])
    alone = parse("a", write(tmp_path / "a.safetensors", tensors), targets_of_two())
    biased = tensors | {"unet.lin.diff_b": torch.ones(10)}
    assert store.takes(alone)
    assert not store.takes(parse("b", write(tmp_path / "b.safetensors", biased), targets_of_two()))


@pytest.mark.parametrize(
    ("key", "shape", "sentence"),
    [
        ("unet.lin.diff_b", (9,), r"unet\.lin\.diff_b has the shape \(9,\), but unet\.lin\.bias has \(10,\)"),
        ("unet.conv.diff", (4, 27), r"unet\.conv\.diff has the shape"),
        ("unet.norm.diff", (6, 1), r"unet\.norm\.diff has the shape"),
        ("unet.nobody.diff_b", (10,), r"match nothing.*unet\.nobody\.diff_b"),
        ("unet.lin.diff", (10, 6), "two kinds"),
    ],
)
def test_a_difference_that_does_not_fit_is_named(tmp_path, key, shape, sentence):
    """A difference of another shape, of a layer that is not there, or beside factors of the same weight."""
    path = write(tmp_path / "a.safetensors", peft_tensors(factors({"lin": (10, 6)})) | {key: torch.ones(shape)})
    with pytest.raises(LoraError, match=sentence):
        parse("a", path, targets_of_two())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_difference_without_a_number_is_refused(tmp_path, bad):
    """One NaN or infinity refuses the file and names the bias."""
    path = write(tmp_path / "a.safetensors", {"unet.lin.diff_b": torch.tensor([0.0] * 9 + [bad])})
    with pytest.raises(LoraError, match=r"unet\.lin\.bias holds NaN or infinity"):
        parse("a", path, targets_of_two())


def test_a_layer_that_is_not_there_may_only_add_zeros(family, tmp_path):
    """What ComfyUI's text encoders have beyond the model's is left out if it adds nothing, and else refused."""
    tensors = peft_like(family)
    parse("a", write(tmp_path / "a.safetensors", tensors | beyond(family)), family.targets)
    with pytest.raises(LoraError, match=r"match nothing in this model .*text_encoders\.clip_[lh]\.transformer"):
        parse("b", write(tmp_path / "b.safetensors", tensors | beyond(family, up=0.1)), family.targets)
    with pytest.raises(LoraError, match="match nothing"):
        parse("c", write(tmp_path / "c.safetensors", beyond(family)), family.targets)


def peft_like(family: Family) -> dict[str, torch.Tensor]:
    """A small file in ComfyUI's layout."""
    stem = comfyui(family, "unet", "conv_in")
    down, up = pair(tuple(family.parts["unet"].conv_in.weight.shape), 1)
    return {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}


# ---- messages -------------------------------------------------------------------------------------------------------


def test_bundled_embeddings_are_left_out_and_told_once(tmp_path, caplog):
    """A LoRA with `bundle_emb.*` is read as without it; the log says once that the embeddings are not used."""
    tensors = peft_tensors(factors(shapes_of(TwoLayers())))
    bundled = {
        "bundle_emb.<my\ncat>.clip_l": torch.ones(4, 768),
        "bundle_emb.<my\ncat>.clip_g": torch.ones(4, 1280),
        "bundle_emb.dog.clip_l_out": torch.ones(1, 768),
    }
    path = write(tmp_path / "a.safetensors", tensors | bundled)
    with caplog.at_level(logging.WARNING):
        got = [parse("with-embeddings", path, targets_of_two()) for _ in range(2)]
    wanted = parse("without", write(tmp_path / "b.safetensors", tensors), targets_of_two())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("LoRA 'with-embeddings': the embeddings that its file has for ")
    assert "'dog'" in told[0]
    assert told[0].endswith("are not used")
    assert "\n" not in told[0]
    for ref, factor in wanted.factors.items():
        assert torch.equal(got[1].factors[ref].up, factor.up)
    assert got[1].factors.keys() == wanted.factors.keys()


def test_embeddings_alone_are_no_lora(tmp_path):
    """A file of embeddings only is refused as what it is."""
    path = write(tmp_path / "a.safetensors", {"bundle_emb.dog.clip_l": torch.ones(1, 768)})
    with pytest.raises(LoraError, match="textual inversion"):
        parse("a", path, targets_of_two())


@pytest.mark.parametrize(
    ("stem", "layout"),
    [
        ("unet.down_blocks.7.resnets.0.conv1", "PEFT (diffusers)"),
        ("lora_unet_down_blocks_7_resnets_0_conv1", "kohya"),
        ("diffusion_model.blocks.0.self_attn.q", "ComfyUI"),
        ("text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q", "ComfyUI"),
        ("unet.input_blocks.77.0.in_layers.2", "OneTrainer"),
        ("clip_l.something", "OneTrainer"),
        ("lycoris_down_blocks_7_resnets_0_conv1", "SimpleTuner (LyCORIS)"),
    ],
)
def test_unknown_keys_name_the_nearest_layout(stem, layout, tmp_path):
    """The message counts the keys, names the layout that they are most like, and shows three of them."""
    tensors = {f"{stem}.{i}.lora_down.weight": torch.ones(2, 2) for i in range(444)}
    with pytest.raises(LoraError) as caught:
        parse("mine", write(tmp_path / "a.safetensors", tensors), known(FamilyName.SD15).targets)
    first = ", ".join(sorted(tensors)[:3])
    assert caught.value.message == (
        f"LoRA 'mine': 444 of 444 keys match nothing in this model (the nearest layout is that of {layout}): "
        f"{first} and 441 more"
    )


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["lora_unet_down_blocks_0.lora_down.weight", "lora_unet_down_blocks_0.alpha"], "kohya"),
        (["lora_te_text_model.lora_up.weight"], "kohya"),
        (["lora_te1_text_model.lora_up.weight"], "kohya"),
        (["unet.down_blocks.0.attn1.to_q.lora_A.weight"], "peft"),
        (["base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"], "peft"),
        (["unet.down_blocks.0.attn1.processor.to_q_lora.lora.down.weight"], "peft"),
        (["unet.down_blocks.0.attn1.to_q.lora_A"], "peft"),
        (["diffusion_model.out.2.lora_up.weight", "diffusion_model.out.0.diff_b"], "comfyui"),
        (["text_encoders.clip_l.transformer.text_model.final_layer_norm.diff"], "comfyui"),
        (["unet.input_blocks.0.0.lora_up.weight", "bundle_emb.dog.clip_l"], "onetrainer"),
        (["bundle_emb.dog.clip_l", "clip_l.text_model.encoder.layers.0.mlp.fc1.hada_w1_a"], "onetrainer"),
        (["lycoris_mid_block_resnets_0_conv1.lokr_w1"], "simpletuner"),
        (["model.diffusion_model.out.0.weight"], "unknown"),
        (["bundle_emb.dog.clip_l"], "unknown"),
        ([], "unknown"),
    ],
)
def test_a_loras_format_is_told_by_its_names(names, kind):
    """Listings tell layouts apart by the names alone; what is no LoRA is unknown."""
    assert format_of_keys([*names, "__metadata__"]) == kind
