"""What LoRAs may change in a model family: its linear layers and convolutions, with every name used for them.

Files name modules in four ways: diffusers' dotted path, kohya's path with underscores, kohya's SGM block numbers
(SDXL), and CLIP paths with or without `text_model.` (transformers 5 dropped it from `CLIPTextModel`). Instead of
rewriting keys by pattern, all names of every module that exists are listed once, and a key is looked up: what is not
in the table matches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

KOHYA_PREFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"unet": ("lora_unet_",), "text_encoder": ("lora_te_", "lora_te1_"), "text_encoder_2": ("lora_te2_",)}
)

# diffusers' names inside a resnet, and SGM's. Source: the LDM UNet, as diffusers' own converter has it.
_SGM_RESNET = {
    "conv1": "in_layers_2",
    "conv2": "out_layers_3",
    "time_emb_proj": "emb_layers_1",
    "conv_shortcut": "skip_connection",
}
_SGM_TOP = {
    "conv_in": "input_blocks_0_0",
    "conv_out": "out_2",
    "time_embedding.linear_1": "time_embed_0",
    "time_embedding.linear_2": "time_embed_2",
    "add_embedding.linear_1": "label_emb_0_0",
    "add_embedding.linear_2": "label_emb_0_2",
}
_BLOCK = re.compile(r"^(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)$")
_MID = re.compile(r"^mid_block\.(resnets|attentions)\.(\d+)\.(.+)$")
_MID_NUMBER = {("resnets", 0): 0, ("attentions", 0): 1, ("resnets", 1): 2}


class ModuleRef(NamedTuple):
    """A weight by component ("unet", "text_encoder", ...) and dotted module path. A tuple: it is hashed often."""

    component: str
    module: str

    def __str__(self) -> str:
        return f"{self.component}.{self.module}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraTargets:
    """The modules of a family. `shapes` are of their weights: `(o, i)` or `(o, i, kh, kw)`.

    `dotted` and `kohya` map every accepted spelling (with its component prefix) to the module.
    """

    shapes: Mapping[ModuleRef, tuple[int, ...]]
    dotted: Mapping[str, ModuleRef]
    kohya: Mapping[str, ModuleRef]

    @classmethod
    def of(cls, components: Mapping[str, nn.Module]) -> LoraTargets:
        """List the modules of `components`; keys are "unet", "text_encoder" and "text_encoder_2"."""
        shapes: dict[ModuleRef, tuple[int, ...]] = {}
        for component, root in components.items():
            for path, module in root.named_modules():
                if path and is_mergeable(module):
                    shapes[ModuleRef(component, path)] = tuple(module.weight.shape)
        paths = [ref.module for ref in shapes if ref.component == "unet"]
        blocks = _Blocks.of(paths)
        dotted = {name: ref for ref in shapes for name in _dotted_names(ref)}
        kohya = {name: ref for ref in shapes for name in _kohya_names(ref, blocks)}
        return cls(shapes=MappingProxyType(shapes), dotted=MappingProxyType(dotted), kohya=MappingProxyType(kohya))


def components_of(unet: nn.Module, text_encoders: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that LoRAs change, by component."""
    texts = {f"text_encoder{'' if i == 0 else f'_{i + 1}'}": part for i, part in enumerate(text_encoders)}
    return {"unet": unet, **texts}


def is_mergeable(module: nn.Module) -> bool:
    """Return whether a LoRA's product of two matrices can be added to it: linear layers and ungrouped convolutions."""
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def live_weight(module: nn.Module) -> torch.Tensor:
    """Return the tensor that a merge writes."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


@dataclass(frozen=True, slots=True)
class _Blocks:
    """What SGM numbering needs from a UNet: resnets per down block, and which up blocks have attention."""

    resnets: int
    up_with_attention: frozenset[int]

    @classmethod
    def of(cls, paths: list[str]) -> _Blocks:
        matches = [match for path in paths if (match := _BLOCK.match(path))]
        resnets = {int(m[4]) for m in matches if m[1] == "down" and m[2] == "0" and m[3] == "resnets"}
        with_attention = frozenset(int(m[2]) for m in matches if m[1] == "up" and m[3] == "attentions")
        return cls(len(resnets), with_attention)


def _dotted_names(ref: ModuleRef) -> Iterator[str]:
    yield f"{ref.component}.{ref.module}"
    if ref.component == "unet":
        yield ref.module  # `save_attn_procs` wrote UNet files without a prefix
    elif ref.module.startswith("text_model."):
        yield f"{ref.component}.{ref.module.removeprefix('text_model.')}"
    else:
        yield f"{ref.component}.text_model.{ref.module}"


def _kohya_names(ref: ModuleRef, blocks: _Blocks) -> Iterator[str]:
    for prefix in KOHYA_PREFIXES.get(ref.component, ()):
        for name in _dotted_names(ref):
            if name.startswith(f"{ref.component}."):
                yield prefix + name.removeprefix(f"{ref.component}.").replace(".", "_")
        if ref.component == "unet" and (sgm := _sgm_name(ref.module, blocks)):
            yield prefix + sgm


def _sgm_name(path: str, blocks: _Blocks) -> str | None:
    """Translate `down_blocks.1.attentions.0.proj_in` to `input_blocks_4_1_proj_in`."""
    if path in _SGM_TOP:
        return _SGM_TOP[path]
    if match := _MID.match(path):
        number = _MID_NUMBER.get((match[1], int(match[2])))
        return None if number is None else f"middle_block_{number}_{_sgm_inner(match[1], match[3])}"
    if match := _BLOCK.match(path):
        return _sgm_block(match, blocks)
    return None


def _sgm_block(match: re.Match[str], blocks: _Blocks) -> str:
    side, block, kind, index, inner = match[1], int(match[2]), match[3], int(match[4]), match[5]
    first = block * (blocks.resnets + 1)
    if kind == "downsamplers":
        return f"input_blocks_{1 + first + blocks.resnets}_0_op"
    if kind == "upsamplers":
        slot = 2 if block in blocks.up_with_attention else 1
        return f"output_blocks_{first + blocks.resnets}_{slot}_conv"
    number = f"input_blocks_{1 + first + index}" if side == "down" else f"output_blocks_{first + index}"
    return f"{number}_{int(kind == 'attentions')}_{_sgm_inner(kind, inner)}"


def _sgm_inner(kind: str, inner: str) -> str:
    return _SGM_RESNET.get(inner, inner) if kind == "resnets" else inner.replace(".", "_")
