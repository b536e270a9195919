"""What stays of an image while the rest is made anew: in latents after every step, in pixels at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from plait_serving.diffusion.protocols import RequestSampler
from plait_serving.diffusion.values import Edit, RgbImage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blend:
    """The latents outside a mask: `mask (1, 1, h, w)` is 1 where an image is made anew, `image` and `noise` are `(n, c,
    h, w)`."""

    mask: torch.Tensor
    image: torch.Tensor
    noise: torch.Tensor

    def after(self, latents: torch.Tensor, step: int, sampler: RequestSampler) -> torch.Tensor:
        """Return the latents after step `step` with the image's own outside the mask, as noisy as the others."""
        kept = self.image
        if step + 1 < len(sampler.timesteps):
            kept = sampler.add_noise(kept, self.noise, step + 1)
        return self._mix(kept, latents)

    def estimate(self, original: torch.Tensor) -> torch.Tensor:
        """Return an estimate of the finished latents with the image's own outside the mask."""
        return self._mix(self.image, original)

    def _mix(self, kept: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return (1 - self.mask) * kept + self.mask * made


def overlaid(images: tuple[RgbImage, ...], flagged: Sequence[bool], edit: Edit | None) -> tuple[RgbImage, ...]:
    """Return images with the edit's own pixels outside its mask, mixed where the mask is grey; flagged ones, which are
    black, as they are."""
    if edit is None or edit.mask is None or not edit.overlay:
        return images
    made = (edit.mask.astype(np.float32) / 255.0)[..., None]
    kept = edit.image.astype(np.float32) * (1.0 - made)
    return tuple(
        image if is_flagged else np.rint(kept + made * image.astype(np.float32)).astype(np.uint8)
        for image, is_flagged in zip(images, flagged, strict=True)
    )
