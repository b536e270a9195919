"""The published architectures as data: what the `config.json` files of the original repositories say.

Sources: stable-diffusion-v1-5, stable-diffusion-2-1 (the 768-pixel model), stable-diffusion-xl-base-1.0,
sd-controlnet-canny and controlnet-canny-sdxl-1.0. Entries that equal the default of their class are left out. Tests
hold the parameter counts to the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal


class FamilyName(StrEnum):
    """A published architecture."""

    SD15 = "sd15"
    SD21 = "sd21"
    SDXL = "sdxl"
    SD15_CONTROLNET = "sd15-controlnet"
    SDXL_CONTROLNET = "sdxl-controlnet"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One module of a model: the class, the arguments of its configuration, and its folder ("": the model's own)."""

    folder: str
    library: Literal["diffusers", "transformers"]
    class_name: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPart:
    """The scheduler of a pipeline: a class of diffusers and what its published file says.

    The files say more than their own class takes: it is for other schedulers that are made of them.
    """

    class_name: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a model's folder consists of.

    `pipeline` and `scheduler` are None for a ControlNet. `pad_tokens` are those of each tokenizer's folder, and
    `index` is what `model_index.json` holds beside the parts.
    """

    parts: tuple[ModelPart, ...]
    pipeline: str | None = None
    scheduler: SchedulerPart | None = None
    pad_tokens: Mapping[str, str] = field(default_factory=dict)
    index: Mapping[str, Any] = field(default_factory=dict)


_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_ABSENT = [None, None]
_SD_INDEX = {"requires_safety_checker": False, "safety_checker": _ABSENT, "feature_extractor": _ABSENT}
_END, _EXCLAMATION = "<|endoftext|>", "!"

# ---- UNets and ControlNets ------------------------------------------------------------------------------------------

_SD15_BODY = {"attention_head_dim": 8, "cross_attention_dim": 768}
_SD21_BODY = {
    "attention_head_dim": (5, 10, 20, 20),
    "cross_attention_dim": 1024,
    "use_linear_projection": True,
    "upcast_attention": True,
}
_SDXL_BODY = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_SDXL_UP = {"up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")}


def _unet(config: Mapping[str, Any]) -> ModelPart:
    return ModelPart(folder="unet", library="diffusers", class_name="UNet2DConditionModel", config=config)


def _controlnet(config: Mapping[str, Any]) -> Architecture:
    part = ModelPart(folder="", library="diffusers", class_name="ControlNetModel", config=config)
    return Architecture(parts=(part,))


# ---- VAEs and text encoders -----------------------------------------------------------------------------------------


def _vae(sample_size: int, scaling_factor: float) -> ModelPart:
    config = {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
        "sample_size": sample_size,
        "scaling_factor": scaling_factor,
    }
    return ModelPart(folder="vae", library="diffusers", class_name="AutoencoderKL", config=config)


def _text_encoder(width: int, layers: int, heads: int, act: str, *, projection: int, second: bool = False) -> ModelPart:
    config = {
        "vocab_size": 49408,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_act": act,
        "projection_dim": projection,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return ModelPart(
        folder="text_encoder_2" if second else "text_encoder",
        library="transformers",
        class_name="CLIPTextModelWithProjection" if second else "CLIPTextModel",
        config=config,
    )


_CLIP_L = _text_encoder(768, 12, 12, "quick_gelu", projection=768)

# ---- whole models ---------------------------------------------------------------------------------------------------

_SD15 = Architecture(
    pipeline="StableDiffusionPipeline",
    parts=(_CLIP_L, _unet({"sample_size": 64, **_SD15_BODY}), _vae(512, 0.18215)),
    scheduler=SchedulerPart(
        class_name="PNDMScheduler",
        config={**_BETAS, "skip_prk_steps": True, "set_alpha_to_one": False, "clip_sample": False},
    ),
    pad_tokens={"tokenizer": _END},
    index=_SD_INDEX,
)
_SD21 = Architecture(
    pipeline="StableDiffusionPipeline",
    parts=(
        # OpenCLIP ViT-H without its last layer, which Stable Diffusion 2 does not use.
        _text_encoder(1024, 23, 16, "gelu", projection=512),
        _unet({"sample_size": 96, **_SD21_BODY}),
        _vae(768, 0.18215),
    ),
    scheduler=SchedulerPart(
        class_name="DDIMScheduler",
        config={**_BETAS, "clip_sample": False, "set_alpha_to_one": False, "prediction_type": "v_prediction"},
    ),
    pad_tokens={"tokenizer": _EXCLAMATION},
    index=_SD_INDEX,
)
_SDXL = Architecture(
    pipeline="StableDiffusionXLPipeline",
    parts=(
        _CLIP_L,
        _text_encoder(1280, 32, 20, "gelu", projection=1280, second=True),
        _unet({"sample_size": 128, **_SDXL_BODY, **_SDXL_UP}),
        _vae(1024, 0.13025),
    ),
    scheduler=SchedulerPart(
        class_name="EulerDiscreteScheduler", config={**_BETAS, "timestep_spacing": "leading", "clip_sample": False}
    ),
    pad_tokens={"tokenizer": _END, "tokenizer_2": _EXCLAMATION},
    index={"force_zeros_for_empty_prompt": True, "feature_extractor": _ABSENT, "image_encoder": _ABSENT},
)

ARCHITECTURES: Mapping[FamilyName, Architecture] = MappingProxyType(
    {
        FamilyName.SD15: _SD15,
        FamilyName.SD21: _SD21,
        FamilyName.SDXL: _SDXL,
        FamilyName.SD15_CONTROLNET: _controlnet(_SD15_BODY),
        FamilyName.SDXL_CONTROLNET: _controlnet(_SDXL_BODY),
    }
)
