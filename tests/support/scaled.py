"""The published architectures with everything that makes them large taken out: same blocks, a few hundred kilobytes."""

from __future__ import annotations

from dataclasses import replace

from plait_serving.diffusion.published.architectures import ARCHITECTURES, Architecture, FamilyName, ModelPart

IMAGE_SIZE = 64

_TEXT = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_UNET = {"sample_size": 8, "norm_num_groups": 8, "block_out_channels": (16, 32, 32, 32), "cross_attention_dim": 32}
_CHANGES = {
    "text_encoder": {**_TEXT, "hidden_size": 32, "projection_dim": 32},
    "text_encoder_2": {**_TEXT, "hidden_size": 40, "projection_dim": 24},
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


def scaled_down(family: FamilyName) -> Architecture:
    """The family's architecture for 64x64 images."""
    architecture = ARCHITECTURES[family]
    return replace(architecture, parts=tuple(_scaled(part, family) for part in architecture.parts))


def _scaled(part: ModelPart, family: FamilyName) -> ModelPart:
    changes: dict[str, object] = dict(_CHANGES.get(part.folder, _UNET))
    if part.folder not in _CHANGES:
        changes |= _SDXL if "sdxl" in family else {}
        changes |= {"attention_head_dim": (2, 4, 4, 4)} if family is FamilyName.SD21 else {}
        if part.class_name == "ControlNetModel":
            changes["conditioning_embedding_out_channels"] = (4, 4, 8, 8)
            del changes["sample_size"]
    return replace(part, config={**part.config, **changes})
