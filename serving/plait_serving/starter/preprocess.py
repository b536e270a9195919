"""Control maps and style filters of the starter models, on plain uint8 arrays.

Every function takes one image as `uint8[H, W, 3]`, leaves it unchanged and returns a new `uint8[H, W, 3]` of the
same size. They use numpy and scipy only and are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ImageArray = NDArray[np.uint8]
Plane = NDArray[np.float64]

COLOR_BLOCK_PX = 4
PIXEL_BLOCK_PX = 8
EDGE_SIGMA_PX = 0.8
# Gradient of the blurred image, in grey levels per pixel: a line starts at HIGH and goes on down to LOW.
EDGE_HIGH = 14.0
EDGE_LOW = 6.0
SKETCH_SIGMA_PX = 0.6
SKETCH_GAIN = 8.0


def _gradient(image: ImageArray, sigma_px: float) -> tuple[Plane, Plane]:
    """Return the horizontal and vertical slope of the colour channel that changes most, per pixel."""
    from scipy import ndimage  # a third of a second, for those who ask for a control map

    smooth = ndimage.gaussian_filter(image.astype(np.float64), (sigma_px, sigma_px, 0.0), mode="nearest")
    # ndimage.sobel would blur across the colour channels too.
    dy, dx = (
        ndimage.correlate1d(
            ndimage.correlate1d(smooth, (0.25, 0.5, 0.25), axis=1 - axis, mode="nearest"),
            (-0.5, 0.0, 0.5), axis=axis, mode="nearest",
        )
        for axis in (0, 1)
    )  # fmt: skip
    best = np.argmax(dx**2 + dy**2, axis=2)[..., None]
    return np.take_along_axis(dx, best, 2)[..., 0], np.take_along_axis(dy, best, 2)[..., 0]


def _thin(dx: Plane, dy: Plane) -> Plane:
    """Return the gradient magnitude where it is the largest across the edge, else 0 (non-maximum suppression)."""
    size = np.hypot(dx, dy)
    sector = np.round(np.arctan2(dy, dx) / (np.pi / 4)).astype(np.int64) % 4
    padded = np.pad(size, 1)
    height, width = size.shape
    keep = np.zeros(size.shape, dtype=bool)
    for index, (step_y, step_x) in enumerate([(0, 1), (1, 1), (1, 0), (1, -1)]):
        ahead = padded[1 + step_y : 1 + step_y + height, 1 + step_x : 1 + step_x + width]
        behind = padded[1 - step_y : 1 - step_y + height, 1 - step_x : 1 - step_x + width]
        keep |= (sector == index) & (size >= ahead) & (size > behind)
    return np.where(keep, size, 0.0)


def edge_mask(image: ImageArray) -> NDArray[np.bool_]:
    """Return Canny edges as `bool[H, W]`: blur, slope, thinning, hysteresis between `EDGE_LOW` and `EDGE_HIGH`."""
    from scipy import ndimage

    thin = _thin(*_gradient(image, EDGE_SIGMA_PX))
    labels, count = ndimage.label(thin >= EDGE_LOW, structure=np.ones((3, 3)))
    strong = np.zeros(count + 1, dtype=bool)
    strong[np.unique(labels[thin >= EDGE_HIGH])] = True
    strong[0] = False
    return np.asarray(strong[labels], dtype=np.bool_)


def edges(image: ImageArray) -> ImageArray:
    """Draw white one-pixel lines on black: the control map of the `edges` ControlNet."""
    return np.repeat(edge_mask(image)[..., None].astype(np.uint8) * np.uint8(255), 3, axis=2)


def block_means(image: ImageArray, block_px: int) -> NDArray[np.float64]:
    """Return the mean colour of each block, `float64[ceil(H/b), ceil(W/b), 3]`; blocks at the border may be cut."""
    rows = np.arange(0, image.shape[0], block_px)
    columns = np.arange(0, image.shape[1], block_px)
    total = np.add.reduceat(np.add.reduceat(image.astype(np.float64), rows, 0), columns, 1)
    heights = np.diff(np.append(rows, image.shape[0]))
    widths = np.diff(np.append(columns, image.shape[1]))
    return np.asarray(total / (heights[:, None] * widths[None, :])[..., None])


def unblock(means: NDArray[np.float64], block_px: int, height: int, width: int) -> ImageArray:
    """Return the flat image whose blocks have these means: the inverse of `block_means`."""
    flat = np.clip(np.rint(means), 0, 255).astype(np.uint8)
    return flat.repeat(block_px, axis=0).repeat(block_px, axis=1)[:height, :width]


def colors(image: ImageArray) -> ImageArray:
    """Replace every 4x4-pixel block by its mean: the control map of the `colors` ControlNet."""
    return unblock(block_means(image, COLOR_BLOCK_PX), COLOR_BLOCK_PX, image.shape[0], image.shape[1])


def pixel(image: ImageArray) -> ImageArray:
    """Replace every 8x8-pixel block by its mean: what the `pixel` LoRA was trained on."""
    return unblock(block_means(image, PIXEL_BLOCK_PX), PIXEL_BLOCK_PX, image.shape[0], image.shape[1])


def sketch(image: ImageArray) -> ImageArray:
    """Draw grey pencil lines on white, darker where the colour changes faster: the `sketch` LoRA's target."""
    slope = np.hypot(*_gradient(image, SKETCH_SIGMA_PX))
    ink = np.clip(255.0 - SKETCH_GAIN * slope, 0.0, 255.0)
    return np.repeat(np.rint(ink).astype(np.uint8)[..., None], 3, axis=2)


Preprocessor = Literal["edges", "colors"]
PREPROCESSORS: Mapping[str, Callable[[ImageArray], ImageArray]] = {"edges": edges, "colors": colors}
