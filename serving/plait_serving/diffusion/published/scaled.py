"""The published architectures with everything that makes them large taken out: same blocks, a few megabytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait_serving.diffusion.published.architectures import ARCHITECTURES, Architecture, FamilyName, ModelPart

IMAGE_SIZE = 64
"""The edge of their images. FLUX.1's configuration says none."""

_TEXT = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_UNET = {"sample_size": 8, "norm_num_groups": 8, "block_out_channels": (16, 32, 32, 32), "cross_attention_dim": 32}
_CHANGES: Mapping[str, Mapping[str, object]] = {
    "text_encoder": {**_TEXT, "hidden_size": 32, "projection_dim": 32},
    "text_encoder_2": {**_TEXT, "hidden_size": 40, "projection_dim": 24},
    "T5EncoderModel": {"d_model": 80, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "vae": {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "sample_size": IMAGE_SIZE},
}
_SDXL = {
    "block_out_channels": (16, 32, 32),
    "attention_head_dim": (2, 4, 4),
    "transformer_layers_per_block": (1, 2, 3),
    "cross_attention_dim": 32 + 40,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 24,
}
_SD3 = {
    "sample_size": 8,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 80,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 32 + 24,
    "pos_embed_max_size": 16,
}
_FLUX = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 80,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}


def scaled_down(family: FamilyName) -> Architecture:
    """Return a family's architecture for 64x64 images."""
    architecture = ARCHITECTURES[family]
    return replace(architecture, parts=tuple(_scaled(part, family) for part in architecture.parts))


def _scaled(part: ModelPart, family: FamilyName) -> ModelPart:
    changes: Mapping[str, object] | None = _CHANGES.get(part.class_name) or _CHANGES.get(part.folder)
    return replace(part, config={**part.config, **(changes or _scaled_body(part, family))})


def _scaled_body(part: ModelPart, family: FamilyName) -> Mapping[str, object]:
    """Return what changes in a model that steps, or in a ControlNet."""
    if part.class_name == "FluxTransformer2DModel":
        return _FLUX
    if part.class_name == "SD3Transformer2DModel":
        return {**_SD3, "dual_attention_layers": part.config["dual_attention_layers"][:2]}
    changes: dict[str, object] = {**_UNET, **(_SDXL if "sdxl" in family else {})}
    changes |= {"attention_head_dim": (2, 4, 4, 4)} if family is FamilyName.SD21 else {}
    if part.class_name == "ControlNetModel":
        changes["conditioning_embedding_out_channels"] = (4, 4, 8, 8)
        del changes["sample_size"]
    return changes
