"""A base model's parts, loaded from a diffusers folder.

Only safetensors is read: pickled weights are refused. Anything that could silently make wrong images (missing
weights, a UNet feature that has no input, a refiner) is a `ModelError` that names the file and the reason.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.encoders import Parts, TextEncoders, WeightedPart, tokenizer_of
from plait_serving.diffusion.families.unet.config import UNetKind, check_unet_config, check_vae_config, kind_of_config
from plait_serving.diffusion.families.unet.scheduler import SchedulerConfig, scheduler_config
from plait_serving.diffusion.loading import outline_module, translate
from plait_serving.diffusion.sources.file_kinds import read_json
from plait_serving.diffusion.weight_files import find_weights

_log = logging.getLogger(__name__)

DENOISER = "unet"
"""The component that steps run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bundle:
    """Modules in eval mode, without gradients, on one device. Frozen; LoRA merges write into the parameters.

    `tokenizers[i]` belongs to `text_encoders[i]`; SDXL has two. `width` and `height` are the size the model was made
    for, in pixels; `vae_factor` is pixels per latent. `vae_dtype` is float32 where float16 would overflow.
    `weights_bytes`: what all weights take in memory but the text encoders'; `decoding_bytes_per_pixel`: what decoding
    an image takes. In an outline the modules have no weights, and there is no safety checker; `parts`: what they are
    loaded from. Text encoders never have: `encoders` are those in memory. `mapped`: what is as the files hold it.
    """

    folder: Path
    kind: UNetKind
    unet: nn.Module
    vae: nn.Module
    tokenizers: tuple[Any, ...]
    text_encoders: tuple[nn.Module, ...]
    scheduler_config: SchedulerConfig
    safety_checker: nn.Module | None
    feature_extractor: Any | None
    force_zeros_for_empty_prompt: bool
    width: int
    height: int
    vae_factor: int
    dtype: torch.dtype
    vae_dtype: torch.dtype
    device: torch.device
    weights_bytes: int
    decoding_bytes_per_pixel: int
    parts: Parts
    encoders: TextEncoders | None = None
    mapped: frozenset[str] = frozenset()

    @property
    def texts(self) -> Parts:
        """What the text encoders are loaded from."""
        return {name: part for name, part in self.parts.items() if name.startswith("text_encoder")}

    @property
    def latent_channels(self) -> int:
        """The number of channels of a latent."""
        return int(self.config["out_channels"])

    @property
    def inpaints(self) -> bool:
        """Whether the UNet takes more channels than a latent has: a mask and the masked image."""
        return int(self.config["in_channels"]) > self.latent_channels

    @property
    def config(self) -> Mapping[str, Any]:
        """The UNet's configuration."""
        return cast("Mapping[str, Any]", self.unet.config)

    @property
    def embeds_guidance(self) -> bool:
        """Whether the UNet takes the guidance scale as an input (LCM) instead of running twice."""
        return self.config["time_cond_proj_dim"] is not None

    @property
    def size_multiple(self) -> int:
        """Widths and heights must be multiples of this, in pixels: diffusers' pipelines require 8."""
        return max(8, self.vae_factor)

    @property
    def min_whole_edge(self) -> int:
        """The min edge, in pixels, that every level of the UNet halves without a remainder."""
        levels = len(self.config["block_out_channels"])
        return max(self.size_multiple, self.vae_factor << (levels - 1))


# ---- loading --------------------------------------------------------------------------------------------------------


def outline_bundle(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", safety_checker: bool = True
) -> Bundle:
    """Read a diffusers folder without its weights: what is known of a model before it is in memory. Raises
    `ModelError`.

    float16 files are upcast when `dtype` is float32. `safety_checker=False` leaves out a folder's checker.
    """
    index, unet_config, vae_config = _configs(folder)
    kind = kind_of_config(unet_config)
    overflows = kind is UNetKind.SDXL and dtype is torch.float16 and vae_config.get("force_upcast", True)
    vae_dtype = torch.float32 if overflows else dtype
    factor = 2 ** (len(vae_config["block_out_channels"]) - 1)
    size = unet_config.get("sample_size") or 64
    height, width = (factor * edge for edge in (size if isinstance(size, list | tuple) else (size, size)))
    encoders = _text_kinds(folder, kind)
    _check_text_width(folder, unet_config, encoders)
    kinds = {"unet": UNet2DConditionModel, "vae": AutoencoderKL, **encoders}
    written = read_json(folder / "scheduler" / "scheduler_config.json")
    files = {part: (find_weights(folder / part), vae_dtype if part == "vae" else dtype) for part in kinds}
    modules = {part: outline_module(each, *files[part]) for part, each in kinds.items()}
    parts = {part: WeightedPart(each, *files[part], modules[part].config) for part, each in kinds.items()}
    extractor = _feature_extractor(folder, index) if safety_checker else None
    if extractor is not None:
        parts["safety_checker"] = WeightedPart(_checker_kind(), find_weights(folder / "safety_checker"), dtype)
    return Bundle(
        folder=folder,
        kind=kind,
        unet=modules["unet"],
        vae=modules["vae"],
        tokenizers=tuple(tokenizer_of(folder, part, CLIPTokenizer) for part in encoders),
        text_encoders=tuple(modules[part] for part in encoders),
        scheduler_config=scheduler_config(folder, written, index.get("scheduler"), kind),
        safety_checker=None,
        feature_extractor=extractor,
        force_zeros_for_empty_prompt=bool(index.get("force_zeros_for_empty_prompt", kind is UNetKind.SDXL)),
        width=width,
        height=height,
        vae_factor=factor,
        dtype=dtype,
        vae_dtype=vae_dtype,
        device=torch.device(device),
        weights_bytes=sum(part.nbytes for name, part in parts.items() if name not in encoders),
        # The decoder's last level has full size and twice the channels of the configuration's first, about four times
        # over: 3.8 to 4.7 KB a pixel were measured for SD 1.5 in float32. A step of the UNet takes less.
        decoding_bytes_per_pixel=4 * 2 * int(vae_config["block_out_channels"][0]) * vae_dtype.itemsize,
        parts=parts,
    )


def loaded(outline: Bundle, encoders: TextEncoders, *, mapped: frozenset[str] = frozenset()) -> Bundle:
    """Return the parts with their weights, beside text encoders that are in memory. `mapped`: which of "unet" and
    "vae" stay as the files hold them, as an executor has taken over (`resident_weights`). Raises `ModelError`."""
    modules = {
        name: part.mapped() if name in mapped else part.load(outline.device)
        for name, part in outline.parts.items()
        if name not in outline.texts
    }
    return replace(
        outline,
        unet=modules["unet"],
        vae=modules["vae"],
        safety_checker=modules.get("safety_checker"),
        encoders=encoders,
        mapped=mapped,
    )


def components_of(bundle: Bundle) -> dict[str, nn.Module]:
    """Return the modules that LoRAs change, by component."""
    return {DENOISER: bundle.unet, **dict(zip(bundle.texts, bundle.text_encoders, strict=True))}


def _configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the configurations of the pipeline, the UNet and the VAE, checked."""
    index = read_json(folder / "model_index.json")
    _check_pipeline(folder, index)
    unet = _whole(UNet2DConditionModel, read_json(folder / "unet" / "config.json"))
    vae = _whole(AutoencoderKL, read_json(folder / "vae" / "config.json"))
    check_vae_config(vae, kind_of_config(unet), folder / "vae" / "config.json")
    check_unet_config(unet, vae, folder / "unet" / "config.json")
    return index, unet, vae


def _whole(kind: Any, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a part's configuration says, with its class's defaults for what it leaves out, as diffusers does."""
    declared = inspect.signature(kind.__init__).parameters.values()
    return {**{each.name: each.default for each in declared if each.default is not each.empty}, **written}


def _check_pipeline(folder: Path, index: Mapping[str, Any]) -> None:
    path = folder / "model_index.json"
    if index.get("requires_aesthetics_score"):
        raise ModelError(f"{path}: an SDXL refiner is not supported as a base model")
    for part in ("unet", "vae", "scheduler", "text_encoder", "tokenizer"):
        if not (folder / part).is_dir():
            raise ModelError(f"{folder / part}: missing")
    if index.get("image_encoder", [None])[0] is not None:
        _log.info("%s: image_encoder is not used", path)


def _check_text_width(folder: Path, unet: Mapping[str, Any], encoders: Mapping[str, Any]) -> None:
    width = sum(
        translate(folder / part, kind.config_class.from_pretrained).hidden_size for part, kind in encoders.items()
    )
    wanted = unet["cross_attention_dim"]
    if wanted != width:
        raise ModelError(
            f"{folder / 'unet' / 'config.json'}: cross_attention_dim is {wanted}, the text is {width} wide"
        )


# ---- parts ----------------------------------------------------------------------------------------------------------


def _text_kinds(folder: Path, kind: UNetKind) -> Mapping[str, Any]:
    """Return the classes of the text encoders, whose folders are there."""
    kinds: dict[str, Any] = {"text_encoder": CLIPTextModel}
    if kind is UNetKind.SDXL:
        kinds["text_encoder_2"] = CLIPTextModelWithProjection
    for encoder in kinds:
        read_json(folder / encoder / "config.json")
    return kinds


def _feature_extractor(folder: Path, index: Mapping[str, Any]) -> Any | None:
    """Return what prepares images for the folder's safety checker; None if it has no checker."""
    if (index.get("safety_checker") or [None])[0] is None:
        return None
    from transformers import CLIPImageProcessor

    for part in ("safety_checker", "feature_extractor"):
        if not (folder / part).is_dir():
            raise ModelError(f"{folder / part}: missing, though model_index.json names a safety checker")
    return translate(folder / "feature_extractor", partial(CLIPImageProcessor.from_pretrained, local_files_only=True))


def _checker_kind() -> Any:
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

    return StableDiffusionSafetyChecker
