"""The formats of LoRA files: how each tool spells the name of a module.

diffusers, and PEFT with it, write the dotted path of the module. kohya's trainer writes it with underscores, or, for
SDXL, with the block numbers of the original UNet. ComfyUI (`LoraSave`) and OneTrainer write the original UNet's dotted
names and CLIP's, each under prefixes of its own, SimpleTuner what LyCORIS makes of diffusers' path. Of transformers
(Stable Diffusion 3, FLUX.1) kohya and ComfyUI write the original names, ai-toolkit diffusers' or ComfyUI's, XLabs those
of processors. CLIP paths come with and without `text_model.` (transformers 5 dropped it from `CLIPTextModel`). No torch
here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class LoraFormat(Enum):
    """A format; the value is its common name."""

    PEFT = "peft"
    KOHYA = "kohya"
    COMFYUI = "comfyui"
    ONETRAINER = "onetrainer"
    SIMPLETUNER = "simpletuner"
    XLABS = "xlabs"

    @property
    def title(self) -> str:
        """Its name in messages."""
        return _TITLES.get(self.value, self.value)


_TITLES = {
    "peft": "PEFT (diffusers)",
    "comfyui": "ComfyUI",
    "onetrainer": "OneTrainer",
    "simpletuner": "SimpleTuner (LyCORIS)",
    "xlabs": "XLabs",
}


# How keys begin that are not in diffusers' format, and what a file of another kind has in none.
_STARTS: Mapping[LoraFormat, re.Pattern[str]] = {
    LoraFormat.XLABS: re.compile(r"(diffusion_model\.)?(double|single)_blocks\.\d+\.processor\."),
    LoraFormat.KOHYA: re.compile(r"lora_(unet|transformer|te\d?)_"),
    LoraFormat.COMFYUI: re.compile(r"(diffusion_model|text_encoders)\."),
    LoraFormat.ONETRAINER: re.compile(
        r"(unet\.)?(input_blocks|middle_block|output_blocks|time_embed|label_emb|out)\.\d|clip_[lgh]\."
    ),
    LoraFormat.SIMPLETUNER: re.compile(r"lycoris_"),
}
_ADDS = re.compile(
    r"[._]lora\d?[._](A|B|down|up)(\.|$)|\.lora_linear_layer\.|\.(hada|lokr)_w|\.diff(_b)?$|\.[wb]_norm$"
)

_KOHYA_TEXT = {"text_encoder": ("lora_te_", "lora_te1_"), "text_encoder_2": ("lora_te2_",)}
# A model's only or first encoder is CLIP-L in SD 1.x and XL, OpenCLIP-H in SD 2.x.
_CLIPS = {"text_encoder": ("clip_l", "clip_h"), "text_encoder_2": ("clip_g",)}

# diffusers' names inside a resnet, and the original's. Source: the LDM UNet, as diffusers' own converter has it.
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_TOP = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_BLOCK = re.compile(r"^(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)$")
_MID = re.compile(r"^mid_block\.(resnets|attentions)\.(\d+)\.(.+)$")
_MID_NUMBER = {("resnets", 0): 0, ("attentions", 0): 1, ("resnets", 1): 2}


def format_of(*keys: str) -> LoraFormat:
    """Return the format that keys of a file, or names of modules, look like."""
    return next((form for form, start in _STARTS.items() if any(map(start.match, keys))), LoraFormat.PEFT)


def format_of_keys(keys: Iterable[str]) -> str:
    """Return the format of a file with these keys, by its common name, or "unknown": they are of no LoRA."""
    adding = [key for key in keys if _ADDS.search(key)]
    return format_of(*adding).value if adding else "unknown"


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the original numbering of a UNet needs: resnets per down block, and which up blocks have attention."""

    resnets: int
    up_with_attention: frozenset[int]

    @classmethod
    def of(cls, paths: Sequence[str]) -> Blocks:
        """Take the paths of a UNet's modules."""
        matches = [match for path in paths if (match := _BLOCK.match(path))]
        resnets = {int(m[4]) for m in matches if m[1] == "down" and m[2] == "0" and m[3] == "resnets"}
        with_attention = frozenset(int(m[2]) for m in matches if m[1] == "up" and m[3] == "attentions")
        return cls(len(resnets), with_attention)


def spellings(component: str, path: str, blocks: Blocks) -> Iterator[str]:
    """Yield every name that files have for a module of a component."""
    if not is_text(component):
        yield from _of_denoiser(component, path, blocks)
        return
    bare = path.removeprefix("text_model.")
    for either in (bare, f"text_model.{bare}"):
        yield f"{component}.{either}"
        for prefix in _KOHYA_TEXT.get(component, ()):
            yield prefix + _flat(either)
        for clip in _CLIPS.get(component, ()):
            yield f"text_encoders.{clip}.transformer.{either}"
            yield f"{clip}.{either}"  # OneTrainer


def original_spellings(name: str) -> Iterator[str]:
    """Yield every name that files have for a layer of an original transformer (`published.original_names`)."""
    yield name
    yield f"diffusion_model.{name}"
    if ".processor." not in name:  # XLabs' own
        yield f"lora_unet_{_flat(name)}"


def is_text(component: str) -> bool:
    """Return whether a component is a text encoder, by its folder's name in diffusers, not the model that steps."""
    return component.startswith("text_encoder")


def _of_denoiser(component: str, path: str, blocks: Blocks) -> Iterator[str]:
    yield f"{component}.{path}"
    yield path  # `save_attn_procs` wrote files without a prefix
    yield f"lora_unet_{_flat(path)}"  # kohya's word for every model that steps
    yield f"lycoris_{_flat(path)}"
    if component != "unet":
        yield f"lora_{component}_{_flat(path)}"
        yield f"diffusion_model.{path}"
    if original := _original(path, blocks):
        yield f"lora_unet_{_flat(original)}"
        yield f"diffusion_model.{original}"
        yield f"unet.{original}"
        yield original  # OneTrainer's "original" output has no prefix


def _flat(path: str) -> str:
    return path.replace(".", "_")


def _original(path: str, blocks: Blocks) -> str | None:
    """Translate `down_blocks.1.attentions.0.proj_in` to `input_blocks.4.1.proj_in`."""
    if path in _TOP:
        return _TOP[path]
    if match := _MID.match(path):
        number = _MID_NUMBER.get((match[1], int(match[2])))
        return None if number is None else f"middle_block.{number}.{_inner(match[1], match[3])}"
    if match := _BLOCK.match(path):
        return _original_block(match, blocks)
    return None


def _original_block(match: re.Match[str], blocks: Blocks) -> str:
    side, block, kind, index, inner = match[1], int(match[2]), match[3], int(match[4]), match[5]
    first = block * (blocks.resnets + 1)
    if kind == "downsamplers":
        return f"input_blocks.{1 + first + blocks.resnets}.0.op"
    if kind == "upsamplers":
        slot = 2 if block in blocks.up_with_attention else 1
        return f"output_blocks.{first + blocks.resnets}.{slot}.conv"
    number = f"input_blocks.{1 + first + index}" if side == "down" else f"output_blocks.{first + index}"
    return f"{number}.{int(kind == 'attentions')}.{_inner(kind, inner)}"


def _inner(kind: str, inner: str) -> str:
    return _RESNET.get(inner, inner) if kind == "resnets" else inner
