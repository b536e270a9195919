"""What a model's configuration, or the names in its file, say of it: its kind, and whether plait can run it. Loads no
library."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.sources.file_kinds import DENOISER, SINGLE_CONTROLNET, read_json


class UNetKind(StrEnum):
    """What a base model is compatible with: LoRAs and ControlNets of the same kind fit it."""

    SD1 = "sd1"
    SD2 = "sd2"
    SDXL = "sdxl"


def kind_of_config(unet_config: Mapping[str, Any]) -> UNetKind:
    """Return the kind of a UNet or ControlNet configuration."""
    if unet_config.get("addition_embed_type") == "text_time":
        return UNetKind.SDXL
    # SD 2.x's text encoder is OpenCLIP ViT-H, 1024 wide; SD 1.x's CLIP ViT-L is 768.
    return UNetKind.SD2 if unet_config.get("cross_attention_dim") == 1024 else UNetKind.SD1


def kind_of(folder: Path) -> str:
    """Return the kind of a diffusers folder's UNet. Raises `ModelError`."""
    return str(kind_of_config(read_json(folder / "unet" / "config.json")))


# ---- checkpoints in one file, in the original layout ----------------------------------------------------------------

VAE = "first_stage_model."
_TEXTS: Mapping[str, UNetKind] = {
    "conditioner.embedders.1.": UNetKind.SDXL,
    "cond_stage_model.model.": UNetKind.SD2,
    "cond_stage_model.transformer.": UNetKind.SD1,
}
"""What the keys of the text encoder that only one kind has begin with."""


def kind_of_file(keys: Collection[str]) -> str | None:
    """Return the kind of a whole checkpoint with tensors of these names; None: it is of no UNet. Raises `ModelError`,
    without naming the file, for one that is not whole."""
    if _has(keys, "conditioner.embedders.0.model."):
        raise ModelError("an SDXL refiner is not supported as a base model")
    parts = {"UNet": DENOISER, "VAE": VAE}
    lacks = [name for name, prefix in parts.items() if not _has(keys, prefix)]
    kind = next((kind for prefix, kind in _TEXTS.items() if _has(keys, prefix)), None)
    if not lacks and kind is not None:
        return str(kind)
    if len(lacks) == len(parts):
        return None
    what = " and ".join(lacks) or "text encoder"
    raise ModelError(f"holds no {what}; only whole checkpoints are read, with UNet, VAE and text encoders")


def _has(keys: Collection[str], prefix: str) -> bool:
    return any(key.startswith(prefix) for key in keys)


# ---- checks on configurations ---------------------------------------------------------------------------------------

_MOMENTS = "; a mean and a deviation for each channel of an SDXL model are"
_PLAIN_BLOCKS = {
    "DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D",
    "UNetMidBlock2DCrossAttn", "UNetMidBlock2D",
}  # fmt: skip


def check_unet_config(unet: Mapping[str, Any], vae: Mapping[str, Any], path: Path) -> None:
    """Raise `ModelError` for a UNet with extra inputs that plait does not provide."""
    _refuse_features(unet, path)
    blocks = [*unet["down_block_types"], *unet["up_block_types"], unet.get("mid_block_type", "UNetMidBlock2DCrossAttn")]
    strange = sorted({str(block) for block in blocks} - _PLAIN_BLOCKS - {"None"})
    if strange:
        raise ModelError(f"{path}: blocks of type {', '.join(strange)} are not supported")
    latents = vae.get("latent_channels", 4)
    if unet.get("in_channels", 4) not in (latents, 2 * latents + 1) or unet.get("out_channels", 4) != latents:
        raise ModelError(
            f"{path}: the UNet takes {unet.get('in_channels')} channels and the VAE makes {latents}; only models for "
            f"inpainting ({2 * latents + 1} channels) take more than that"
        )


def check_vae_config(vae: Mapping[str, Any], kind: UNetKind, path: Path) -> None:
    """Raise `ModelError` for a VAE of another class, or for latents that the kind's pipelines do not scale so."""
    named = vae.get("_class_name", "AutoencoderKL")
    if named != "AutoencoderKL":
        raise ModelError(f"{path}: {named} is not supported; AutoencoderKL is")
    moments = [key for key in ("latents_mean", "latents_std") if vae.get(key) is not None]
    channels = vae.get("latent_channels", 4)
    are_read = kind is UNetKind.SDXL and [len(vae[key]) for key in moments] == [channels, channels]
    for key in ["shift_factor", *([] if are_read else moments)]:
        if vae.get(key) is not None:
            raise ModelError(f"{path}: {key} = {vae[key]!r} is not supported{_MOMENTS if key in moments else ''}")


def check_controlnet(folder: Path, *, base: Mapping[str, Any] | None = None, vae_factor: int | None = None) -> None:
    """Raise `ModelError` for a ControlNet's folder that cannot run or does not fit the base model."""
    if folder.is_file():
        raise ModelError(f"{folder}: {SINGLE_CONTROLNET}")
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    path = folder / "config.json"
    config = read_json(path)
    kind = config.get("_class_name", "ControlNetModel")
    if kind != "ControlNetModel":
        raise ModelError(f"{path}: a {kind} is not supported; plain ControlNetModel is")
    _refuse_features(config, path)
    if config.get("global_pool_conditions"):
        raise ModelError(f"{path}: global_pool_conditions (guess mode) is not supported")
    if (order := config.get("controlnet_conditioning_channel_order", "rgb")) not in ("rgb", "bgr"):
        raise ModelError(f"{path}: unknown channel order {order!r}")
    if (channels := config.get("conditioning_channels", 3)) != 3:
        raise ModelError(f"{path}: a control image has 3 channels; this ControlNet reads {channels}")
    if base is not None:
        base = {**base, "in_channels": base.get("out_channels", 4)}  # ControlNets see latents, no mask
        for key in ("cross_attention_dim", "block_out_channels", "layers_per_block", "down_block_types", "in_channels",
                    "transformer_layers_per_block", "addition_embed_type"):  # fmt: skip
            ours, theirs = _plain(config.get(key)), _plain(base.get(key))
            if ours != theirs and None not in (config.get(key, ...), base.get(key, ...)):
                raise ModelError(f"{path}: {key} is {ours}, the base model's is {theirs}: it is for another base model")
        if kind_of_config(config) is not kind_of_config(base):
            raise ModelError(f"{path}: made for {kind_of_config(config)}, the base model is {kind_of_config(base)}")
    embedding = config.get("conditioning_embedding_out_channels", (16, 32, 96, 256))
    if vae_factor is not None and 2 ** (len(embedding) - 1) != vae_factor:
        raise ModelError(
            f"{path}: it shrinks control images by {2 ** (len(embedding) - 1)}, the base model's latents are "
            f"{vae_factor} times smaller than images"
        )


def _refuse_features(config: Mapping[str, Any], path: Path) -> None:
    """Raise `ModelError` for features that need inputs beyond text, time and SDXL's sizes."""
    unsupported = {
        "class_embed_type": "class conditioning",
        "num_class_embeds": "class conditioning",
        "class_embeddings_concat": "class conditioning",
        "encoder_hid_dim": "a projection of the text",
        "encoder_hid_dim_type": "a projection of text or image embeddings (IP-Adapter, Kandinsky)",
        "dual_cross_attention": "attention to text and image",
    }
    for key, what in unsupported.items():
        if config.get(key) not in (None, False):
            raise ModelError(f"{path}: {key} = {config[key]!r}: {what} is not supported")
    if config.get("attention_type", "default") != "default":
        raise ModelError(f"{path}: attention_type = {config['attention_type']!r}: GLIGEN is not supported")
    if config.get("addition_embed_type") not in (None, "text_time"):
        raise ModelError(f"{path}: addition_embed_type = {config['addition_embed_type']!r} is not supported")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
