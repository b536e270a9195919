"""Latents to images, off the step loop: VAE decode, safety check, 8-bit RGB."""

from __future__ import annotations

import torch

from plait_serving.diffusion.protocols import Denoiser, SafetyChecker
from plait_serving.diffusion.values import RgbImage


class Decoder:
    """Runs on the decode thread while the compute thread keeps stepping."""

    def __init__(self, denoiser: Denoiser, safety: SafetyChecker | None) -> None:
        self._denoiser = denoiser
        self._safety = safety

    def decode(self, latents: torch.Tensor) -> tuple[tuple[RgbImage, ...], tuple[bool, ...]]:
        """Decode `(n, c, h, w)` to n images and their safety flags."""
        with torch.inference_mode():
            images = self._denoiser.finish(latents)
            flagged = (False,) * len(images)
            if self._safety is not None:
                images, flagged = self._safety.check(images)
            return to_rgb(images), flagged


def to_rgb(images: torch.Tensor) -> tuple[RgbImage, ...]:
    """Convert `float (n, 3, H, W)` in [0, 1] to n `uint8 (H, W, 3)`, rounded like diffusers' image processor."""
    array = images.float().clamp(0, 1).permute(0, 2, 3, 1).mul(255).round().to(torch.uint8).cpu().numpy()
    return tuple(array)
