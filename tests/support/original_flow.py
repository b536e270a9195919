"""Stable Diffusion 3's and FLUX.1's transformers under their authors' own names, from diffusers' weights.

Written from the original code, and held to diffusers' converters by a test: what they make of it is what it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.ldm import original_vae

State = Mapping[str, torch.Tensor]
_SIDES = (
    ("img", "x_block", ("to_q", "to_k", "to_v"), "to_out.0", ("norm_q", "norm_k"), "ff", "norm1"),
    ("txt", "context_block", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", ("norm_added_q", "norm_added_k"),
     "ff_context", "norm1_context"),
)  # fmt: skip
_TEXTS = {
    "sd3": {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl"},
    "flux": {"text_encoder": "clip_l", "text_encoder_2": "t5xxl"},
}


class _Renaming:
    """Copies weights and biases from one state to another, and keeps count."""

    def __init__(self, state: State) -> None:
        self._left = dict(state)
        self.made: dict[str, torch.Tensor] = {}

    def blocks(self, stack: str) -> int:
        """How many of a stack there are."""
        return len({key.split(".")[1] for key in self._left if key.startswith(f"{stack}.")})

    def take(self, name: str, *modules: str, to: str = "weight", swapped: bool = False) -> None:
        """Lays the rows of modules that are there one below the other. ``swapped``: with halves changed."""
        for parameter in ("weight", "bias"):
            parts = [self._left.pop(f"{module}.{parameter}", None) for module in modules]
            if all(part is not None for part in parts):
                rows = torch.cat(parts)
                rows = torch.cat(rows.chunk(2)[::-1]) if swapped else rows
                self.made[f"{name}.{to if parameter == 'weight' else parameter}"] = rows

    def alone(self, name: str, key: str) -> None:
        """Copies a tensor that is nobody's weight."""
        self.made[name] = self._left.pop(key)

    def all_made(self) -> dict[str, torch.Tensor]:
        """What was made of everything."""
        assert not self._left, sorted(self._left)
        return self.made


def original_flux(state: State) -> dict[str, torch.Tensor]:
    """Black Forest Labs' names of a FLUX.1 transformer."""
    it = _Renaming(state)
    it.take("img_in", "x_embedder")
    it.take("txt_in", "context_embedder")
    for original, ours in (("time_in", "timestep"), ("vector_in", "text"), ("guidance_in", "guidance")):
        it.take(f"{original}.in_layer", f"time_text_embed.{ours}_embedder.linear_1")
        it.take(f"{original}.out_layer", f"time_text_embed.{ours}_embedder.linear_2")
    for i in range(it.blocks("transformer_blocks")):
        block = f"transformer_blocks.{i}"
        for side, _, qkv, out, norms, ff, modulation in _SIDES:
            original = f"double_blocks.{i}.{side}"
            it.take(f"{original}_mod.lin", f"{block}.{modulation}.linear")
            it.take(f"{original}_attn.qkv", *(f"{block}.attn.{each}" for each in qkv))
            for name, norm in zip(("query_norm", "key_norm"), norms, strict=True):
                it.take(f"{original}_attn.norm.{name}", f"{block}.attn.{norm}", to="scale")
            it.take(f"{original}_attn.proj", f"{block}.attn.{out}")
            it.take(f"{original}_mlp.0", f"{block}.{ff}.net.0.proj")
            it.take(f"{original}_mlp.2", f"{block}.{ff}.net.2")
    for i in range(it.blocks("single_transformer_blocks")):
        block, original = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        it.take(f"{original}.modulation.lin", f"{block}.norm.linear")
        it.take(f"{original}.linear1", *(f"{block}.attn.to_{each}" for each in "qkv"), f"{block}.proj_mlp")
        for name, norm in (("query_norm", "norm_q"), ("key_norm", "norm_k")):
            it.take(f"{original}.norm.{name}", f"{block}.attn.{norm}", to="scale")
        it.take(f"{original}.linear2", f"{block}.proj_out")
    it.take("final_layer.adaLN_modulation.1", "norm_out.linear", swapped=True)
    it.take("final_layer.linear", "proj_out")
    return it.all_made()


def original_sd3(state: State) -> dict[str, torch.Tensor]:
    """Stability AI's names of a Stable Diffusion 3 transformer."""
    it = _Renaming(state)
    it.alone("pos_embed", "pos_embed.pos_embed")
    it.take("x_embedder.proj", "pos_embed.proj")
    it.take("context_embedder", "context_embedder")
    for original, ours in (("t_embedder", "timestep"), ("y_embedder", "text")):
        it.take(f"{original}.mlp.0", f"time_text_embed.{ours}_embedder.linear_1")
        it.take(f"{original}.mlp.2", f"time_text_embed.{ours}_embedder.linear_2")
    blocks = it.blocks("transformer_blocks")
    for i in range(blocks):
        block = f"transformer_blocks.{i}"
        for _, side, qkv, out, norms, ff, modulation in _SIDES:
            original = f"joint_blocks.{i}.{side}"
            is_final = side == "context_block" and i == blocks - 1
            it.take(f"{original}.adaLN_modulation.1", f"{block}.{modulation}.linear", swapped=is_final)
            for attention in ("attn", "attn2") if side == "x_block" else ("attn",):
                it.take(f"{original}.{attention}.qkv", *(f"{block}.{attention}.{each}" for each in qkv))
                for name, norm in zip(("ln_q", "ln_k"), norms, strict=True):
                    it.take(f"{original}.{attention}.{name}", f"{block}.{attention}.{norm}")
                it.take(f"{original}.{attention}.proj", f"{block}.{attention}.{out}")
            it.take(f"{original}.mlp.fc1", f"{block}.{ff}.net.0.proj")
            it.take(f"{original}.mlp.fc2", f"{block}.{ff}.net.2")
    it.take("final_layer.adaLN_modulation.1", "norm_out.linear", swapped=True)
    it.take("final_layer.linear", "proj_out")
    return it.all_made()


# ---- whole files ----------------------------------------------------------------------------------------------------

_WEIGHTS = "diffusion_pytorch_model.safetensors"


def original_transformer(folder: Path) -> dict[str, torch.Tensor]:
    """The transformer of a diffusers folder under its original names."""
    state = load_file(folder / "transformer" / _WEIGHTS)
    return original_flux(state) if "x_embedder.weight" in state else original_sd3(state)


def write_flow_file(folder: Path, path: Path, *, vae: str | None = None, texts: bool = False) -> Path:
    """Writes a diffusers folder's transformer as one file: alone as its authors publish it, or, below the names that
    ComfyUI gives them, with its VAE (whose names begin with ``vae``) and its text encoders."""
    tensors = original_transformer(folder)
    kind = "flux" if "img_in.weight" in tensors else "sd3"
    if vae is not None or kind == "sd3":
        tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    if vae is not None:
        tensors |= {f"{vae}{name}": tensor for name, tensor in original_vae(folder / "vae").items()}
    for part, name in _TEXTS[kind].items() if texts else ():
        state = load_file(folder / part / "model.safetensors")
        tensors |= {f"text_encoders.{name}.transformer.{key}": tensor for key, tensor in state.items()}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return path
