"""Latents to images and back with the VAE, one image at a time, scaled as in diffusers' pipelines; the safety check."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, cast

import torch
from PIL import Image

from plait_kernels.executors import PreparedProgram
from plait_serving.diffusion.decoding import to_rgb
from plait_serving.diffusion.families.unet.bundle import UNetBundle
from plait_serving.diffusion.protocols import EncodedImage, SafetyChecker

_log = logging.getLogger(__name__)


def decode_latents(bundle: UNetBundle, latents: torch.Tensor, program: PreparedProgram | None = None) -> torch.Tensor:
    """Decode `(n, c, h, w)` to `float32 (n, 3, H, W)` in [0, 1]. Changes nothing in the bundle.

    `program` is the VAE's decoder prepared by an executor; None: torch runs the VAE.

    Images are decoded one by one: a batch of 8 needed 34.7 GB at 1024x1024, and an image must not depend on its
    neighbours.
    """
    vae: Any = bundle.vae
    scaled = unscale(bundle, latents.to(device=bundle.device, dtype=bundle.vae_dtype))
    rows = [scaled[i : i + 1] for i in range(len(scaled))]
    images = [vae.decode(row, return_dict=False)[0] if program is None else program.run([row])[0] for row in rows]
    return (torch.cat(images).float() / 2 + 0.5).clamp(0, 1)


def unscale(bundle: UNetBundle, latents: torch.Tensor) -> torch.Tensor:
    """Scale latents to the VAE's input: SDXL's may have a mean and a deviation per channel."""
    config: Any = bundle.vae.config
    factor = float(config.scaling_factor)
    if config.latents_mean is None:
        return latents / factor
    shape = (1, latents.shape[1], 1, 1)
    spread, centre = (latents.new_tensor(each).view(shape) for each in (config.latents_std, config.latents_mean))
    return latents * spread / factor + centre


def encode_image(bundle: UNetBundle, pixels: torch.Tensor) -> EncodedImage:
    """Encode `float32 (1, 3, H, W)` in [-1, 1] with torch. Changes nothing in the bundle.

    The UNet's latents undo what `unscale` does. diffusers' XL Inpaint pipelines leave out a mean and a deviation
    per channel here; its Img2Img pipelines have them in both places, as this has.
    """
    vae: Any = bundle.vae
    distribution = vae.encode(pixels.to(device=bundle.device, dtype=bundle.dtype).to(bundle.vae_dtype)).latent_dist
    config = vae.config
    centre: torch.Tensor | float = 0.0
    factor: torch.Tensor | float = float(config.scaling_factor)
    if config.latents_mean is not None:
        shape = (1, distribution.mean.shape[1], 1, 1)
        centre = torch.tensor(config.latents_mean, device=bundle.device, dtype=bundle.dtype).view(shape)
        spread = torch.tensor(config.latents_std, device=bundle.device, dtype=bundle.dtype).view(shape)
        factor = config.scaling_factor / spread
    return EncodedImage(
        mean=distribution.mean, deviation=distribution.std, centre=centre, factor=factor, dtype=bundle.dtype
    )


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
