"""Stable Diffusion 3 and FLUX.1 as their authors wrote them: which of diffusers' modules an original layer is.

Their checkpoints, and most LoRA files, have the original names. A layer there may be several modules here, whose rows
lie one below the other in its weight, and the last modulation has its halves the other way round. Both follow from one
table. Sources: the two repositories' code, as diffusers' own converters read it. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OriginalLayer:
    """A layer of the original model, by its dotted name. `modules` are diffusers': one, or several whose rows it has in
    this order. `halves_swapped`: a shift and a scale, which diffusers has the other way round."""

    name: str
    modules: tuple[str, ...]
    halves_swapped: bool = False


def _mlp(original: str, inner: tuple[str, str], ours: str) -> dict[str, str]:
    return {f"{original}.{name}": f"{ours}.linear_{i}" for i, name in enumerate(inner, start=1)}


def _stream(start: str, originals: tuple[str, ...], ours: tuple[str, ...]) -> dict[str, str]:
    return {start + original: modules for original, modules in zip(originals, ours, strict=True)}


_TIMESTEP, _POOLED = "time_text_embed.timestep_embedder", "time_text_embed.text_embedder"
_FINAL = "final_layer.adaLN_modulation.1"
_QKV = "attn.to_q attn.to_k attn.to_v"
_ADDED_QKV = "attn.add_q_proj attn.add_k_proj attn.add_v_proj"

# A block's layers that images and texts have one each of, in one order.
_OF_IMAGE = ("norm1.linear", _QKV, "attn.norm_q", "attn.norm_k", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
_OF_TEXT = (
    "norm1_context.linear", _ADDED_QKV, "attn.norm_added_q", "attn.norm_added_k", "attn.to_add_out",
    "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip
_FLUX_PARTS = ("mod.lin", "attn.qkv", "attn.norm.query_norm", "attn.norm.key_norm", "attn.proj", "mlp.0", "mlp.2")
_SD3_PARTS = ("adaLN_modulation.1", "attn.qkv", "attn.ln_q", "attn.ln_k", "attn.proj", "mlp.fc1", "mlp.fc2")

# The rows of a table: an original name, and diffusers' modules. "#" is the number of a block.
_SHARED = {"final_layer.linear": "proj_out", _FINAL: "norm_out.linear"}
_IO = ("in_layer", "out_layer")
_FLUX: Mapping[str, str] = {
    **_SHARED,
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    **_mlp("time_in", _IO, _TIMESTEP),
    **_mlp("vector_in", _IO, _POOLED),
    **_mlp("guidance_in", _IO, "time_text_embed.guidance_embedder"),
    **_stream("double_blocks.#.img_", _FLUX_PARTS, _OF_IMAGE),
    **_stream("double_blocks.#.txt_", _FLUX_PARTS, _OF_TEXT),
    "single_blocks.#.modulation.lin": "norm.linear",
    "single_blocks.#.linear1": f"{_QKV} proj_mlp",
    "single_blocks.#.norm.query_norm": "attn.norm_q",
    "single_blocks.#.norm.key_norm": "attn.norm_k",
    "single_blocks.#.linear2": "proj_out",
    # XLabs trains processors of its own beside the layers; these names are in its LoRAs only.
    "double_blocks.#.processor.qkv_lora1": _QKV,
    "double_blocks.#.processor.proj_lora1": "attn.to_out.0",
    "double_blocks.#.processor.qkv_lora2": _ADDED_QKV,
    "double_blocks.#.processor.proj_lora2": "attn.to_add_out",
    "single_blocks.#.processor.qkv_lora": _QKV,
    "single_blocks.#.processor.proj_lora": "proj_out",
}
_SD3: Mapping[str, str] = {
    **_SHARED,
    "x_embedder.proj": "pos_embed.proj",
    "context_embedder": "context_embedder",
    **_mlp("t_embedder.mlp", ("0", "2"), _TIMESTEP),
    **_mlp("y_embedder.mlp", ("0", "2"), _POOLED),
    "joint_blocks.#.x_block.attn2.qkv": _QKV.replace("attn.", "attn2."),
    "joint_blocks.#.x_block.attn2.ln_q": "attn2.norm_q",
    "joint_blocks.#.x_block.attn2.ln_k": "attn2.norm_k",
    "joint_blocks.#.x_block.attn2.proj": "attn2.to_out.0",
    **_stream("joint_blocks.#.x_block.", _SD3_PARTS, _OF_IMAGE),
    **_stream("joint_blocks.#.context_block.", _SD3_PARTS, _OF_TEXT),
}
_STACKS = {"double_blocks.": "transformer_blocks", "joint_blocks.": "transformer_blocks",
           "single_blocks.": "single_transformer_blocks"}  # fmt: skip
_BLOCK = re.compile(r"^((?:single_)?transformer_blocks)\.(\d+)\.")


def original_layers(paths: Collection[str]) -> Iterator[OriginalLayer]:
    """Yield the original layers of the transformer whose modules have these paths; of other models, none."""
    there = frozenset(paths)
    blocks: dict[str, int] = {}
    for match in filter(None, map(_BLOCK.match, paths)):
        blocks[match[1]] = max(blocks.get(match[1], 0), int(match[2]) + 1)
    table = _FLUX if "x_embedder" in there and "single_transformer_blocks" in blocks else _SD3
    if "transformer_blocks" not in blocks:
        return
    for name, modules in table.items():
        stack = next((ours for start, ours in _STACKS.items() if name.startswith(start)), None)
        for number in range(blocks.get(stack, 0)) if stack else (0,):
            start = f"{stack}.{number}." if stack else ""
            found = tuple(start + module for module in modules.split())
            if there.issuperset(found):
                # Of the last block's context only the keys and values are of use, so its modulation is a final one.
                is_last = number == blocks["transformer_blocks"] - 1
                swapped = name == _FINAL or (name.endswith("context_block.adaLN_modulation.1") and is_last)
                yield OriginalLayer(name.replace("#", str(number)), found, swapped)
