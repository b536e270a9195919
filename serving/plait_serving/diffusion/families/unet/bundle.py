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
from typing import Any, ClassVar, cast

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from plait_serving.diffusion.decoding import to_rgb
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.bundle import Bundle
from plait_serving.diffusion.families.encoders import TextEncoders, WeightedPart
from plait_serving.diffusion.families.unet.config import UNetKind, check_unet_config, check_vae_config, kind_of_config
from plait_serving.diffusion.families.unet.scheduler import SchedulerConfig, scheduler_config
from plait_serving.diffusion.loading import translate
from plait_serving.diffusion.protocols import SafetyChecker
from plait_serving.diffusion.sources.file_kinds import read_json
from plait_serving.diffusion.weight_files import find_weights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UNetBundle(Bundle):
    """The parts of one model. `width` and `height` are the size it was made for, in pixels. `encoders` are the text
    encoders in memory; `mapped`: what is as the files hold it."""

    denoiser: ClassVar[str] = "unet"

    kind: UNetKind
    scheduler_config: SchedulerConfig
    feature_extractor: Any | None
    force_zeros_for_empty_prompt: bool
    width: int
    height: int
    encoders: TextEncoders | None = None
    mapped: frozenset[str] = frozenset()

    @property
    def unet(self) -> Any:
        """What steps run."""
        return self.modules["unet"]

    @property
    def safety_checker(self) -> Any | None:
        """The folder's checker; None: it has none, or none is wanted, or it is not loaded."""
        return self.modules.get("safety_checker")

    @property
    def inpaints(self) -> bool:
        """Whether the UNet takes more channels than a latent has: a mask and the masked image."""
        return int(self.config["in_channels"]) > int(self.config["out_channels"])

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
) -> UNetBundle:
    """Read a diffusers folder without its weights: what is known of a model before it is in memory. Raises
    `ModelError`.

    float16 files are upcast when `dtype` is float32. `safety_checker=False` leaves out a folder's checker.
    """
    index, unet_config, vae_config = _configs(folder)
    kind = kind_of_config(unet_config)
    # In float16 SDXL's VAE overflows.
    overflows = kind is UNetKind.SDXL and dtype is torch.float16 and vae_config.get("force_upcast", True)
    factor = 2 ** (len(vae_config["block_out_channels"]) - 1)
    size = unet_config.get("sample_size") or 64
    height, width = (factor * edge for edge in (size if isinstance(size, list | tuple) else (size, size)))
    encoders = _text_kinds(folder, kind)
    _check_text_width(folder, unet_config, encoders)
    written = read_json(folder / "scheduler" / "scheduler_config.json")
    extractor = _feature_extractor(folder, index) if safety_checker else None
    bundle = UNetBundle.outline(
        folder,
        {"unet": UNet2DConditionModel, "vae": AutoencoderKL, **encoders},
        frozenset({"vae"} if overflows else ()),
        dtype=dtype,
        device=torch.device(device),
        kind=kind,
        scheduler_config=scheduler_config(folder, written, index.get("scheduler"), kind),
        feature_extractor=extractor,
        force_zeros_for_empty_prompt=bool(index.get("force_zeros_for_empty_prompt", kind is UNetKind.SDXL)),
        width=width,
        height=height,
    )
    if extractor is None:
        return bundle
    checker = WeightedPart(_checker_kind(), find_weights(folder / "safety_checker"), dtype)
    return replace(bundle, parts={**bundle.parts, "safety_checker": checker})


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


def _checked(checker: Any, feature_extractor: Any, images: torch.Tensor) -> tuple[torch.Tensor, tuple[bool, ...]]:
    pil_images = [Image.fromarray(image) for image in to_rgb(images)]
    pixels = feature_extractor(pil_images, return_tensors="pt").pixel_values
    parameter = next(checker.parameters())
    checked, flags = checker(
        images=images.clone(), clip_input=pixels.to(device=parameter.device, dtype=parameter.dtype)
    )
    return cast("torch.Tensor", checked), tuple(bool(flag) for flag in flags)


def safety_of(bundle: UNetBundle) -> SafetyChecker | None:
    """Return the bundle's checker, or None with a line in the log: the folder has none or it was switched off."""
    if bundle.safety_checker is None:
        _log.info("%s: no safety checker", bundle.folder)
        return None
    return partial(_checked, bundle.safety_checker, bundle.feature_extractor)
