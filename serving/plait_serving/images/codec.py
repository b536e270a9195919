"""Images to bytes and back. All Pillow calls of the serving side are made here.

Input is hostile: formats are limited to PNG, JPEG and WebP (no decoder that starts another program), decoders get only
what an image's pixels depend on (`trimming.py`), the size is checked from the header before any pixel is decoded, and
there is no way to name a URL or a path.
"""

from __future__ import annotations

import binascii
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Literal, TypeAlias

import numpy as np
from PIL import Image, ImageFilter, ImageOps, PngImagePlugin

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.values import GreyImage, RgbImage
from plait_serving.images.trimming import trimmed


class OutputFormat(StrEnum):
    """How finished images are encoded; the value is the HTTP spelling."""

    PNG = "png"
    JPEG = "jpeg"
    WEBP = "webp"


Paper: TypeAlias = Literal["black", "white"]
"""What lies beneath transparent pixels: black for control maps (black means "nothing here"), white for images."""

INPUT_FORMATS = ("PNG", "JPEG", "WEBP")
# Measured on 1024x1024 images, smooth with a little grain: at most 7 % larger than level 6, 1.6 to 4 times as fast.
PNG_LEVEL = 4
# The EXIF block of a JPEG lives in one APP1 segment, whose length is a 16-bit number (JEITA CP-3451, 4.7.2).
JPEG_EXIF_MAX_BYTES = 65_533 - 6
_EXIF_IFD, _USER_COMMENT, _ORIENTATION = 0x8769, 0x9286, 0x0112
_LYING = 5  # EXIF's orientations from here on swap the edges
_DATA_URL = re.compile(r"data:image/(?:png|jpe?g|webp);base64,", re.IGNORECASE)
_SPACES = (b"\n", b"\r", b" ", b"\t")
_BASE64_AT_ONCE = 1 << 20  # a multiple of 4; some 3 ms in which no other thread gets the interpreter


MAX_BYTES, MAX_PIXELS, MAX_EDGE_PX = 20 * 2**20, 16_000_000, 8192
"""What one image of a request may cost. 16 MP is four times the largest size that SDXL is used at."""


def decode_base64(text: str, *, param: str) -> bytes:
    """Decode plain base64 or a `data:image/...;base64,` URL. Raises `RequestError` naming `param`."""
    if text[:5].lower() == "data:":
        match = _DATA_URL.match(text)
        if match is None:
            raise RequestError("only data URLs of base64 PNG, JPEG or WebP are understood", param=param)
        text = text[match.end() :]
    elif "://" in text[:32]:
        raise RequestError("send the image itself as base64; URLs and paths are never opened", param=param)
    if len(text) > MAX_BYTES * 4 // 3 + 4096:  # slack for line breaks and padding
        raise RequestError(f"the image is larger than {MAX_BYTES} bytes", param=param)
    try:
        raw = _decoded(text.encode("ascii"))
    except ValueError as error:
        raise RequestError("not valid base64", param=param) from error
    return bounded(raw, param=param)


def bounded(raw: bytes, *, param: str) -> bytes:
    """Return the bytes of an image. Raises `RequestError` if there are too many."""
    if len(raw) > MAX_BYTES:
        raise RequestError(f"the image is larger than {MAX_BYTES} bytes", param=param)
    return raw


def _decoded(text: bytes) -> bytes:
    """Decode base64 with line breaks. Raises `ValueError`."""
    if any(space in text for space in _SPACES):
        text = text.translate(None, b"".join(_SPACES))
    if b"=" in text[:-2]:
        raise ValueError("there is more behind its end")
    parts = (text[at : at + _BASE64_AT_ONCE] for at in range(0, len(text), _BASE64_AT_ONCE))
    return b"".join(binascii.a2b_base64(part, strict_mode=True) for part in parts)


def decode_image(raw: bytes, *, param: str, paper: Paper = "white") -> RgbImage:
    """Decode the first frame of a PNG, JPEG or WebP to `uint8 (H, W, 3)`, upright, without its metadata.

    Transparent pixels are laid on `paper`; 16-bit grey is scaled to 8 bits. Raises `RequestError` naming `param`.
    """
    with _opened(raw, param=param) as (image, orientation):
        return np.array(_to_rgb(_upright(image, orientation), paper), dtype=np.uint8)


def decode_layers(raw: bytes, *, param: str) -> tuple[RgbImage, GreyImage | None]:
    """Decode like `decode_image`, on white, and return how transparent the pixels are, too: `uint8 (H, W)`, 255 where
    nothing is seen of a pixel; None if no pixel is at least half transparent."""
    with _opened(raw, param=param) as (pil_image, orientation):
        image = _upright(pil_image, orientation)
        rgb = np.array(_to_rgb(image, "white"), dtype=np.uint8)
        if image.mode.startswith("I") or not image.has_transparency_data:
            return rgb, None
        clear = 255 - np.array(image.convert("RGBA").getchannel("A"), dtype=np.uint8)
        return rgb, clear if clear.max() >= 128 else None


def decode_mask(raw: bytes, *, param: str) -> GreyImage:
    """Decode a mask to `uint8 (H, W)`, 255 where an image is to be made anew: at its transparent pixels, which is
    OpenAI's rule; at its white ones if none is transparent, which is everybody else's."""
    rgb, clear = decode_layers(raw, param=param)
    return np.array(Image.fromarray(rgb).convert("L"), dtype=np.uint8) if clear is None else clear


def image_size(raw: bytes, *, param: str) -> tuple[int, int]:
    """Return width and height of an image, upright, without decoding a pixel. Raises like `decode_image`."""
    with _opened(raw, param=param) as (image, orientation):
        width, height = image.size
        return (height, width) if orientation >= _LYING else (width, height)


def painted_mask(raw: bytes, *, size: tuple[int, int], inverted: bool, blur_px: float, param: str) -> bytes:
    """Return a mask of A1111's as a PNG of ours, stretched to the `size` of its image. There, too, white is made anew;
    of a mask with transparent pixels, though, what is not transparent. `inverted`: the other way round; `blur_px`: the
    deviation of a Gaussian, in the mask's own pixels."""
    rgb, clear = decode_layers(raw, param=param)
    mask = Image.fromarray(rgb).convert("L") if clear is None else Image.fromarray(255 - clear)
    mask = ImageOps.invert(mask) if inverted else mask
    soft = mask.filter(ImageFilter.GaussianBlur(blur_px))
    if np.asarray(soft).max() < 128 <= np.asarray(mask).max():
        raise RequestError("it leaves nothing of the mask that is to be made anew: blur it less", param="mask_blur")
    out = io.BytesIO()
    soft.resize(size, Image.Resampling.LANCZOS).save(out, "PNG", compress_level=1)
    return out.getvalue()


@contextmanager
def _opened(raw: bytes, *, param: str) -> Iterator[tuple[Image.Image, int]]:
    """Open the first frame, and tell its orientation; whatever goes wrong with it in the context is the sender's."""
    try:
        file, orientation = trimmed(raw, param=param)
        with Image.open(io.BytesIO(file), formats=INPUT_FORMATS) as pil_image:
            width, height = pil_image.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_EDGE_PX:
                most = f"{MAX_PIXELS} pixels and {MAX_EDGE_PX} along an edge"
                raise RequestError(f"the image is {width}x{height}; at most {most} are accepted", param=param)
            yield pil_image, orientation
    except RequestError:
        raise
    except Image.DecompressionBombError as error:
        raise RequestError("the image has too many pixels", param=param) from error
    except Exception as error:  # Pillow raises a dozen types for broken files; none of them is ours
        raise RequestError("not a readable PNG, JPEG or WebP image", param=param) from error


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    image.getexif()[_ORIENTATION] = orientation  # it has no other EXIF any more
    return ImageOps.exif_transpose(image)


def _to_rgb(pil_image: Image.Image, paper: Paper) -> Image.Image:
    if pil_image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion clips instead of scaling
        wide = np.clip(np.asarray(pil_image) >> 8, 0, 255)  # of 2 or 4 bytes, as the mode has it
        return Image.fromarray(wide.astype(np.uint8)).convert("RGB")
    if pil_image.has_transparency_data:
        rgba = pil_image.convert("RGBA")
        sheet = Image.new("RGBA", rgba.size, paper)
        return Image.alpha_composite(sheet, rgba).convert("RGB")
    return pil_image.convert("RGB")


def resize(image: RgbImage, *, width: int, height: int) -> RgbImage:
    """Stretch `(H, W, 3)`, or a mask `(H, W)`, to `(height, width, ...)` with Lanczos on uint8, exactly like diffusers
    resizes images and masks."""
    if image.shape[:2] == (height, width):
        return image
    return np.array(Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS), dtype=np.uint8)


def encode_image(
    image: RgbImage, output_format: OutputFormat, *, quality: int = 100, parameters: str | None = None
) -> bytes:
    """Encode `uint8 (H, W, 3)` as a file. `quality` 0..100 is for jpeg and webp only.

    `parameters` is stored where A1111 stores it: PNG text chunk "parameters", else EXIF UserComment. In a JPEG
    it is left out when it does not fit into the one EXIF segment (about 32,000 characters).
    """
    out = io.BytesIO()
    pil_image = Image.fromarray(image)
    if output_format is OutputFormat.PNG:
        info = PngImagePlugin.PngInfo()
        if parameters is not None:
            info.add_text("parameters", parameters)
        pil_image.save(out, format="PNG", pnginfo=info, compress_level=PNG_LEVEL)
        return out.getvalue()
    exif = b"" if parameters is None else _exif_with_comment(parameters)
    if output_format is OutputFormat.JPEG:
        exif = exif if len(exif) <= JPEG_EXIF_MAX_BYTES else b""
        pil_image.save(out, format="JPEG", quality=quality, subsampling=0 if quality >= 90 else 2, exif=exif)
    else:
        pil_image.save(out, format="WEBP", quality=quality, exif=exif)
    return out.getvalue()


def _exif_with_comment(text: str) -> bytes:
    exif = Image.Exif()
    exif[_EXIF_IFD] = {_USER_COMMENT: b"UNICODE\0" + text.encode("utf-16-be")}
    return exif.tobytes()
