"""From an edit's uploads to the `Edit` of a request: decoded within limits, at the output's size."""

from __future__ import annotations

from dataclasses import dataclass

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.values import Edit, GreyImage, RgbImage
from plait_serving.http.images.schemas import EditBody
from plait_serving.images.codec import DecodeLimits, decode_base64, decode_layers, decode_mask, image_size, resize

__all__ = ["IMG2IMG_STRENGTH", "Upload", "upload_of"]

IMG2IMG_STRENGTH = 0.8
"""What diffusers' Img2Img pipeline takes by default; its Inpaint pipeline takes 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Upload:
    """The image file of an edit, not decoded yet; `width` and `height` are its own, upright."""

    body: EditBody
    limits: DecodeLimits
    raw: bytes
    width: int
    height: int

    def edit(self, *, width: int, height: int, steps: int) -> Edit:
        """Decode image and mask, stretched to the output's size. Raises `RequestError` naming the field."""
        image, mask = self._layers()
        strength = self.body.strength
        if strength is None:
            strength = IMG2IMG_STRENGTH if mask is None else 1.0
        edit = Edit(
            image=resize(image, width=width, height=height),
            mask=None if mask is None else resize(mask, width=width, height=height),
            strength=float(strength),
            overlay=self.body.overlay is not False,
        )
        if not edit.steps_of(steps):
            raise RequestError(f"{strength:g} of {steps} steps is not a whole step", param="strength")
        return edit

    def _layers(self) -> tuple[RgbImage, GreyImage | None]:
        image, clear = decode_layers(self.raw, param="image", limits=self.limits)
        if self.body.mask is None:
            return image, clear
        mask = decode_mask(_bytes(self.body.mask, "mask", self.limits), param="mask", limits=self.limits)
        if mask.shape != image.shape[:2]:
            sizes = f"the mask is {mask.shape[1]}x{mask.shape[0]}, the image {self.width}x{self.height}"
            raise RequestError(f"{sizes}: they must be of one size", param="mask")
        if mask.max() < 128:
            raise RequestError(
                "nothing is to be made anew: no pixel of the mask is transparent, and none is white", param="mask"
            )
        return image, mask


def upload_of(body: EditBody, limits: DecodeLimits) -> Upload:
    """Return the image of an edit; only its header is read. Raises `RequestError` naming `image`."""
    raw = _bytes(body.image, "image", limits)
    width, height = image_size(raw, param="image", limits=limits)
    return Upload(body=body, limits=limits, raw=raw, width=width, height=height)


def _bytes(upload: str | bytes, param: str, limits: DecodeLimits) -> bytes:
    if isinstance(upload, str):
        return decode_base64(upload, param=param, limits=limits)
    if len(upload) > limits.max_bytes:
        raise RequestError(f"the image is larger than {limits.max_bytes} bytes", param=param)
    return upload
