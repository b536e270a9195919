"""What the names and shapes in a file in the original layout of Stable Diffusion 3 or FLUX.1 say of it. Loads no
library."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.lora.container import TensorInfo
from plait_serving.diffusion.sources.file_kinds import DENOISER

PARTS: Mapping[str, tuple[str, ...]] = {
    "vae": ("first_stage_model.", "vae."),
    "clip_l": ("text_encoders.clip_l.transformer.",),
    "clip_g": ("text_encoders.clip_g.transformer.",),
    "t5": ("text_encoders.t5xxl.transformer.",),
}
"""What the names of the parts beside the transformer begin with, if a file has them."""

_LOOK_ALIKES: tuple[tuple[str, str], ...] = (
    (r"^redux_(up|down)\.", "FLUX.1 Redux, which turns images into prompts"),
    (r"^(double|single)_stream_modulation", "a FLUX.2 model"),
    (r"^distilled_guidance_layer\.", "a Chroma model"),
    (r"^(mid_convs|down_res)\.\d", "a ControlNeXt, which adds to a model"),
    (r"^(single_)?transformer_blocks\.\d", "a transformer in the layout of diffusers, which is a part of a folder"),
)
OTHER_INPUTS = {
    6: "FLUX.1 Fill, which takes a mask and a masked image",
    2: "FLUX.1 Canny or Depth, which take a control image",
}
"""What a transformer is that takes so many times the channels of FLUX.1."""
_CHANNELS = 64
_QUANTIZED = re.compile(r"\.(quant_state\.|absmax$|quant_map$|qweight$|scale_weight$)")


def own_names(keys: Collection[str]) -> dict[str, str]:
    """Return the names of a file's transformer, without what stands before them in whole checkpoints, and their keys in
    the file."""
    others = tuple(start for starts in PARTS.values() for start in starts)
    return {key.removeprefix(DENOISER): key for key in keys if not key.startswith((*others, "text_encoders."))}


def kind_of_sd3(tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return "sd3" if these tensors are a Stable Diffusion 3, with whatever other parts; or None. Raises `ModelError`,
    without naming the file, for one that is not served."""
    if not is_sd3(tensors):
        return None
    _check(tensors)
    return "sd3"


def is_sd3(keys: Collection[str]) -> bool:
    """Return whether tensors of these names are a Stable Diffusion 3."""
    return any(name.startswith("joint_blocks.") for name in own_names(keys))


def kind_of_flux(tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return "flux1" if these tensors are a FLUX.1, with whatever other parts; or None. Raises `ModelError`, without
    naming the file, for one that is not served, and for what only looks like one."""
    names = own_names(tensors)
    for pattern, what in _LOOK_ALIKES:
        if any(re.match(pattern, name) for name in names):
            raise ModelError(f"{what}: it is not supported as a base model")
    if "img_in.weight" not in names or not any(name.startswith("double_blocks.") for name in names):
        return None
    _check(tensors)
    return "flux1"


def _check(tensors: Mapping[str, TensorInfo]) -> None:
    """Raise `ModelError`, without naming the file, for quantized weights, and for a FLUX.1 with other inputs."""
    for key, info in tensors.items():
        if info.dtype.startswith(("F8", "U8", "I8")) or _QUANTIZED.search(key):
            how = "fp8" if info.dtype.startswith("F8") else "quantized (NF4 or alike)"
            raise ModelError(f"{key} is {info.dtype}: {how} checkpoints are not supported; F16, BF16 and F32 are")
    first = own_names(tensors).get("img_in.weight")
    other = None if first is None else OTHER_INPUTS.get(tensors[first].shape[-1] // _CHANNELS)
    if other is not None:
        raise ModelError(f"this is {other}: not supported")


def transformer_config(tensors: Mapping[str, TensorInfo], *, head: int) -> dict[str, Any]:
    """Return what the shapes of a transformer in the original layout say, beside what all published ones have: `head`
    is the width of an attention head of Stable Diffusion 3."""
    shapes = {name: tensors[key].shape for name, key in own_names(tensors).items()}

    def blocks(stack: str, having: str = "") -> list[int]:
        found = re.compile(rf"^{stack}\.(\d+)\..*{re.escape(having)}")
        return sorted({int(match[1]) for match in map(found.match, shapes) if match})

    if "img_in.weight" in shapes:
        return {
            "num_layers": len(blocks("double_blocks")),
            "num_single_layers": len(blocks("single_blocks")),
            "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        }
    width, joint = shapes["context_embedder.weight"]
    return {
        "num_layers": len(blocks("joint_blocks")),
        "num_attention_heads": width // head,
        "joint_attention_dim": joint,
        "caption_projection_dim": width,
        "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
        "dual_attention_layers": tuple(blocks("joint_blocks", ".attn2.")),
        "qk_norm": "rms_norm" if blocks("joint_blocks", ".ln_q.") else None,
    }
