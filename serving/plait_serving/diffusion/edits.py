"""Requests that start from an image, exactly like diffusers' Img2Img and Inpaint pipelines: what the VAE has to encode,
a unit's first latents, and what stays of the image: in latents after every step, in pixels at the end.

What each image draws from its generator, in this order: the sample of the image's latents, the noise, the sample of the
masked image's latents (diffusers takes that for every mask, whether or not the UNet has a use for it). The VAE encodes
an image once, for all images of a request: only the samples differ. n images are those of n requests; diffusers' own
Inpaint pipelines sample the image of all n with the first generator.

Legend: c, h, w latents; n images of a unit. Written after diffusers 0.42.1, `prepare_latents` and
`prepare_mask_latents` of `pipelines/stable_diffusion/pipeline_stable_diffusion_{img2img,inpaint}.py` and their XL twins
(Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from plait_serving.diffusion.protocols import EncodedImage, RequestSampler
from plait_serving.diffusion.values import Edit, GreyImage, ImageRequest, RgbImage

_EDITED_FROM = 128
"""diffusers' mask processor: a mask's value v / 255 is rounded up from 0.5 on."""


class EditSource:
    """What one request's VAE has to encode, and what became of it. Compute thread only; shared by the request's units.

    An inpainting UNet always takes a mask and a masked image: without an edit everything is masked.
    """

    def __init__(self, edit: Edit, *, inpaints: bool) -> None:
        mask = edit.mask
        if mask is None and inpaints:
            mask = np.full(edit.image.shape[:2], 255, np.uint8)
        self._mask = None if mask is None else _binary(mask)
        # Inpainting from pure noise differs from img2img, which even then adds the noise to the image.
        self._from_noise = mask is not None and edit.strength == 1.0
        self.to_encode: dict[str, torch.Tensor] = {}
        """What the VAE has to encode, by what it is: `float32 (1, 3, H, W)` in [-1, 1]."""
        self.encoded: dict[str, EncodedImage] = {}
        pixels = to_pixels(edit.image)
        if not (inpaints and self._from_noise):
            self.to_encode["image"] = pixels
        if inpaints and self._mask is not None:
            self.to_encode["masked"] = pixels * (self._mask < 0.5)

    @classmethod
    def of(cls, request: ImageRequest, *, inpaints: bool) -> EditSource | None:
        """Return what a request starts from; None for a generation by an ordinary UNet."""
        if request.edit is not None:
            return cls(request.edit, inpaints=inpaints)
        if not inpaints:
            return None
        blank = np.full((request.height, request.width, 3), 128, np.uint8)
        return cls(Edit(image=blank), inpaints=True)

    def start(self, sampler: RequestSampler) -> tuple[torch.Tensor, Blend | None, torch.Tensor | None]:
        """Draw a unit's first latents; return them, what stays of the image, and the channels for an inpainting UNet.
        Everything is encoded."""
        image = _sample(self.encoded.get("image"), sampler)
        noise = sampler.draw()
        if self._from_noise:
            latents = sampler.init_latents(noise)
        else:
            assert image is not None
            latents = sampler.add_noise(image, noise, 0)
        if self._mask is None:
            return latents, None, None
        mask = torch.nn.functional.interpolate(self._mask, size=noise.shape[-2:]).to(noise)
        masked = _sample(self.encoded.get("masked"), sampler)
        if masked is not None:
            return latents, None, torch.cat([mask.expand(len(noise), -1, -1, -1), masked], dim=1)
        assert image is not None
        sampler.draw(self.encoded["image"].mean.dtype)
        return latents, Blend(mask=mask, image=image, noise=noise), None


def to_pixels(image: RgbImage) -> torch.Tensor:
    """Return `float32 (1, 3, H, W)` in [-1, 1], rounded like diffusers' image processor (numpy divides)."""
    scaled = image.astype(np.float32) / 255.0
    return 2.0 * torch.from_numpy(scaled.transpose(2, 0, 1)[None].copy()) - 1.0


def _binary(mask: GreyImage) -> torch.Tensor:
    """Return `float32 (1, 1, H, W)`, 1 where the image is made anew."""
    return torch.from_numpy((mask >= _EDITED_FROM).astype(np.float32))[None, None]


def _sample(encoded: EncodedImage | None, sampler: RequestSampler) -> torch.Tensor | None:
    return None if encoded is None else encoded.sample(sampler.draw(encoded.mean.dtype))


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
