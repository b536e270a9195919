"""The published architectures as data: what the `config.json` files of the original repositories say.

Sources: stable-diffusion-v1-5, stable-diffusion-2-1 (the 768-pixel model), stable-diffusion-xl-base-1.0,
sd-controlnet-canny, controlnet-canny-sdxl-1.0, stable-diffusion-3.5-medium and -large, FLUX.1-dev and -schnell. Entries
that equal the default of their class are left out. Tests hold the parameter counts to the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from plait_serving.diffusion.errors import ModelError


class FamilyName(StrEnum):
    """A published architecture."""

    SD15 = "sd15"
    SD21 = "sd21"
    SDXL = "sdxl"
    SD15_CONTROLNET = "sd15-controlnet"
    SDXL_CONTROLNET = "sdxl-controlnet"
    SD35_MEDIUM = "sd3.5-medium"
    SD35_LARGE = "sd3.5-large"
    FLUX_DEV = "flux.1-dev"
    FLUX_SCHNELL = "flux.1-schnell"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One module of a model: the class, the arguments of its configuration, and its folder ("": the model's own)."""

    folder: str
    library: Literal["diffusers", "transformers"]
    class_name: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a model's folder consists of.

    `pipeline` and `scheduler` are None for a ControlNet. A scheduler's file says more than its own class takes: it is
    for other schedulers that are made of it. `pad_tokens` are those of each CLIP tokenizer's folder; a T5
    encoder has its own. `index` is what `model_index.json` holds beside the parts.
    """

    parts: tuple[ModelPart, ...]
    pipeline: str | None = None
    scheduler: ModelPart | None = None
    pad_tokens: Mapping[str, str] = field(default_factory=dict)
    index: Mapping[str, Any] = field(default_factory=dict)

    def without_t5(self) -> Architecture:
        """Return it with a T5 that `model_index.json` says is not there. Raises `ModelError` if it needs one."""
        t5 = next((part for part in self.parts if part.class_name == T5), None)
        if t5 is None or self.pipeline != SD3_PIPELINE:
            why = "has no T5" if t5 is None else "cannot do without its T5; only Stable Diffusion 3 can"
            raise ModelError(f"{self.pipeline or 'a ControlNet'} {why}")
        absent = dict.fromkeys((t5.folder, tokenizer_of(t5)), _ABSENT)
        return replace(self, parts=tuple(part for part in self.parts if part is not t5), index={**self.index, **absent})


def tokenizer_of(part: ModelPart) -> str:
    """Return the folder of a text encoder's tokenizer."""
    return part.folder.replace("text_encoder", "tokenizer")


T5 = "T5EncoderModel"
SD3_PIPELINE = "StableDiffusion3Pipeline"

_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_ABSENT = [None, None]
_SD_INDEX = {"requires_safety_checker": False, "safety_checker": _ABSENT, "feature_extractor": _ABSENT}
_END, _EXCLAMATION = "<|endoftext|>", "!"
_TRANSFORMER, _FLOW = "transformer", "FlowMatchEulerDiscreteScheduler"

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


def _scheduler(class_name: str, **config: Any) -> ModelPart:
    return ModelPart(folder="scheduler", library="diffusers", class_name=class_name, config=config)


# ---- VAEs and text encoders -----------------------------------------------------------------------------------------


def _vae(sample_size: int, scaling_factor: float, **more: Any) -> ModelPart:
    config = {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
        "sample_size": sample_size,
        "scaling_factor": scaling_factor,
        **more,
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


def _t5(folder: str) -> ModelPart:
    """Return the encoder of T5 v1.1 XXL."""
    config = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
    return ModelPart(folder=folder, library="transformers", class_name=T5, config={"vocab_size": 32128, **config})


_CLIP_L = _text_encoder(768, 12, 12, "quick_gelu", projection=768)
_CLIP_G = _text_encoder(1280, 32, 20, "gelu", projection=1280, second=True)

# ---- whole models ---------------------------------------------------------------------------------------------------

_SD15 = Architecture(
    pipeline="StableDiffusionPipeline",
    parts=(_CLIP_L, _unet({"sample_size": 64, **_SD15_BODY}), _vae(512, 0.18215)),
    scheduler=_scheduler("PNDMScheduler", **_BETAS, skip_prk_steps=True, set_alpha_to_one=False, clip_sample=False),
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
    scheduler=_scheduler(
        "DDIMScheduler", **_BETAS, clip_sample=False, set_alpha_to_one=False, prediction_type="v_prediction"
    ),
    pad_tokens={"tokenizer": _EXCLAMATION},
    index=_SD_INDEX,
)
_SDXL = Architecture(
    pipeline="StableDiffusionXLPipeline",
    parts=(_CLIP_L, _CLIP_G, _unet({"sample_size": 128, **_SDXL_BODY, **_SDXL_UP}), _vae(1024, 0.13025)),
    scheduler=_scheduler("EulerDiscreteScheduler", **_BETAS, timestep_spacing="leading", clip_sample=False),
    pad_tokens={"tokenizer": _END, "tokenizer_2": _EXCLAMATION},
    index={"force_zeros_for_empty_prompt": True, "feature_extractor": _ABSENT, "image_encoder": _ABSENT},
)

# ---- transformers ---------------------------------------------------------------------------------------------------


def _flow_vae(scaling_factor: float, shift_factor: float) -> ModelPart:
    whole = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
    return _vae(1024, scaling_factor, shift_factor=shift_factor, **whole)


def _sd35(depth: int, *, positions: int, dual: int) -> Architecture:
    """Return a model that has as many heads as layers."""
    config = {
        "num_layers": depth,
        "num_attention_heads": depth,
        "caption_projection_dim": 64 * depth,
        "pos_embed_max_size": positions,
        "dual_attention_layers": tuple(range(dual)),
        "qk_norm": "rms_norm",
    }
    return Architecture(
        pipeline=SD3_PIPELINE,
        parts=(
            replace(_CLIP_L, class_name=_CLIP_G.class_name),
            _CLIP_G,
            _t5("text_encoder_3"),
            ModelPart(folder=_TRANSFORMER, library="diffusers", class_name="SD3Transformer2DModel", config=config),
            _flow_vae(1.5305, 0.0609),
        ),
        scheduler=_scheduler(_FLOW, shift=3.0),
        pad_tokens={"tokenizer": _END, "tokenizer_2": _EXCLAMATION},
        index={"image_encoder": _ABSENT, "feature_extractor": _ABSENT},
    )


def _flux(*, guidance: bool) -> Architecture:
    """Return dev, or, without guidance, schnell."""
    config = {"pooled_projection_dim": 768, "guidance_embeds": guidance}
    return Architecture(
        pipeline="FluxPipeline",
        parts=(
            _CLIP_L,
            _t5("text_encoder_2"),
            ModelPart(folder=_TRANSFORMER, library="diffusers", class_name="FluxTransformer2DModel", config=config),
            _flow_vae(0.3611, 0.1159),
        ),
        scheduler=_scheduler(_FLOW, shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance),
        pad_tokens={"tokenizer": _END},
        index={"image_encoder": _ABSENT, "feature_extractor": _ABSENT},
    )


ARCHITECTURES: Mapping[FamilyName, Architecture] = {
    FamilyName.SD15: _SD15,
    FamilyName.SD21: _SD21,
    FamilyName.SDXL: _SDXL,
    FamilyName.SD15_CONTROLNET: _controlnet(_SD15_BODY),
    FamilyName.SDXL_CONTROLNET: _controlnet(_SDXL_BODY),
    FamilyName.SD35_MEDIUM: _sd35(24, positions=384, dual=13),
    FamilyName.SD35_LARGE: _sd35(38, positions=192, dual=0),
    FamilyName.FLUX_DEV: _flux(guidance=True),
    FamilyName.FLUX_SCHNELL: _flux(guidance=False),
}
