"""Images to latents, as in diffusers' pipelines."""

from __future__ import annotations

from typing import Any

import torch

from plait_serving.diffusion.bundle import Bundle
from plait_serving.diffusion.protocols import EncodedImage


def encode_image(bundle: Bundle, pixels: torch.Tensor) -> EncodedImage:
    """Encode `float32 (1, 3, H, W)` in [-1, 1] with torch. Changes nothing in the bundle.

    The UNet's latents undo what `decode.unscale` does. diffusers' XL Inpaint pipelines leave out a mean and a deviation
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
