"""Images to latents, as in diffusers' pipelines."""

from __future__ import annotations

from typing import Any

import torch

from plait_serving.diffusion.bundle import Bundle
from plait_serving.diffusion.model_config import Family
from plait_serving.diffusion.protocols import EncodedImage


def encode_image(bundle: Bundle, pixels: torch.Tensor) -> EncodedImage:
    """Encode `float32 (1, 3, H, W)` in [-1, 1] with torch. Changes nothing in the bundle.

    The UNet's latents undo what `decode.unscale` does. diffusers' XL Inpaint pipeline leaves out a mean and a deviation
    per channel here, though not when it decodes; its Img2Img pipeline has them in both places, as this has.
    """
    vae: Any = bundle.vae
    distribution = vae.encode(pixels.to(device=bundle.device, dtype=bundle.dtype).to(bundle.vae_dtype)).latent_dist
    config = vae.config
    mean, deviation = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    shift = getattr(config, "shift_factor", None)
    centre: torch.Tensor | float = 0.0 if shift is None else float(shift)
    factor: torch.Tensor | float = float(config.scaling_factor)
    if bundle.family is Family.SDXL and mean is not None and deviation is not None:
        shape = (1, distribution.mean.shape[1], 1, 1)
        centre = torch.tensor(mean, device=bundle.device, dtype=bundle.dtype).view(shape)
        spread = torch.tensor(deviation, device=bundle.device, dtype=bundle.dtype).view(shape)
        factor = config.scaling_factor / spread
    return EncodedImage(
        mean=distribution.mean, deviation=distribution.std, centre=centre, factor=factor, dtype=bundle.dtype
    )
