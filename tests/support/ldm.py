"""Stable Diffusion's original layout: a diffusers folder as the one file that people download.

Written by the shapes of the original code (CompVis' LDM, Stability's SGM, OpenCLIP), independently of the library's
converter, which goes the other way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file

_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
_UNET_TOP = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)\.(weight|bias)")
_MID = {("resnets", "0"): "block_1", ("resnets", "1"): "block_2", ("attentions", "0"): "attn_1"}


def config_of(folder: Path) -> dict:
    """The configuration of a part."""
    return json.loads((folder / "config.json").read_text())


def original_names(keys: Iterable[str], layers: int) -> dict[str, str]:
    """The original names of a UNet's weights and biases, by diffusers'; `layers`: its `layers_per_block`."""
    keys = list(keys)
    attentive = {
        int(match[2]) for key in keys if (match := _BLOCK.match(key)) and match.group(1, 3) == ("up", "attentions")
    }
    return {key: _unet_name(key, layers, attentive) for key in keys}


def _unet_name(key: str, layers: int, attentive: set[int]) -> str:
    name, _, kind = key.rpartition(".")
    if name in _UNET_TOP:
        return f"{_UNET_TOP[name]}.{kind}"
    if key.startswith("mid_block."):
        _, part, index, inner = key.split(".", 3)
        place = 1 if part == "attentions" else 2 * int(index)
        return f"middle_block.{place}.{_inner(part, inner)}"
    match = _BLOCK.match(key)
    assert match
    side, block, part, index, inner = match[1], int(match[2]), match[3], int(match[4]), f"{match[5]}.{match[6]}"
    first = block * (layers + 1)
    if part == "downsamplers":
        return f"input_blocks.{first + layers + 1}.0.op.{kind}"
    if part == "upsamplers":
        return f"output_blocks.{first + layers}.{1 + (block in attentive)}.conv.{kind}"
    number = f"input_blocks.{1 + first + index}" if side == "down" else f"output_blocks.{first + index}"
    return f"{number}.{int(part == 'attentions')}.{_inner(part, inner)}"


def _inner(part: str, inner: str) -> str:
    name, _, kind = inner.rpartition(".")
    return f"{_RESNET[name]}.{kind}" if part == "resnets" else inner


def original_vae(folder: Path) -> dict[str, torch.Tensor]:
    """A VAE's weights under their original names."""
    levels = len(config_of(folder)["block_out_channels"])
    made = {}
    for key, value in load_file(folder / "diffusion_pytorch_model.safetensors").items():
        name = key.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        if match := re.match(r"(encoder|decoder)\.mid_block\.(\w+)\.(\d)\.(.+)", name):
            inner = match[4]
            for ours, theirs in {
                "group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out",
            }.items():  # fmt: skip
                inner = inner.replace(ours, theirs) if match[2] == "attentions" else inner
            name = f"{match[1]}.mid.{_MID[match[2], match[3]]}.{inner}"
            if match[2] == "attentions" and value.ndim == 2:
                value = value[:, :, None, None]  # the original has convolutions of one pixel
        elif match := re.match(r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name):
            level = int(match[3]) if match[2] == "down" else levels - 1 - int(match[3])
            inner = f"block.{match[5]}.{match[6]}" if match[4] == "resnets" else f"{match[2]}sample.{match[6]}"
            name = f"{match[1]}.{match[2]}.{level}.{inner}"
        made[name] = value
    return made
