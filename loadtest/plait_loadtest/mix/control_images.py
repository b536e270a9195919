"""Control images and masks drawn from a number, as PNG."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt

_GRID = 64  # cells across; larger images repeat each cell, so that drawing one costs little at any size
_SHAPES = 3
_BACKGROUND, _LINE = 0, 1
_PALETTE_SIZE = 2 + _SHAPES


def control_image(number: int, width: int, height: int) -> bytes:
    """Return a PNG of `width` x `height`: white outlines of three filled discs and boxes on black.

    The same number gives the same bytes; another number gives another image. It has lines for an edge map and areas
    for a colour map.
    """
    rng = np.random.Generator(np.random.Philox(key=[number & (2**64 - 1), 0]))
    cells = _shapes(rng.random((_SHAPES, 4)))
    colours = rng.integers(32, 224, (_PALETTE_SIZE, 3), dtype=np.uint8)
    colours[_BACKGROUND], colours[_LINE] = 0, 255
    rows, columns = (np.arange(edge) * _GRID // edge for edge in (height, width))
    return encode_png(cells[rows[:, None], columns[None, :]], colours)


def mask_image(number: int, width: int, height: int) -> bytes:
    """Return a PNG of `width` x `height`: a white box, a quarter to a half of each edge, on black.

    White is what an edit makes anew. The same number gives the same bytes.
    """
    rng = np.random.Generator(np.random.Philox(key=[number & (2**64 - 1), 1]))
    pixels = np.full((height, width), _BACKGROUND, dtype=np.uint8)
    lines, columns = (_between(edge, *rng.random(2)) for edge in (height, width))
    pixels[lines, columns] = _LINE
    return encode_png(pixels, np.array([[0, 0, 0], [255, 255, 255]], dtype=np.uint8))


def _between(edge: int, length: float, place: float) -> slice:
    """Return a stretch of a quarter to a half of an edge; `length` and `place` are in [0, 1)."""
    taken = max(1, int(edge * (0.25 + 0.25 * length)))
    start = int((edge - taken) * place)
    return slice(start, start + taken)


def _shapes(places: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Return palette indices, uint8 (_GRID, _GRID). `places` (shapes, 4): centre x, centre y, radius, disc or box."""
    cells = np.full((_GRID, _GRID), _BACKGROUND, dtype=np.uint8)
    axis = np.arange(_GRID, dtype=np.float64)
    for shape, (x, y, size, form) in enumerate(places):
        across, down = np.abs(axis - x * _GRID)[None, :], np.abs(axis - y * _GRID)[:, None]
        distance = np.hypot(across, down) if form < 0.5 else np.maximum(across, down)
        radius = _GRID * (0.12 + 0.25 * size)
        cells[distance < radius] = 2 + shape
        cells[np.abs(distance - radius) < 0.75] = _LINE
    return cells


def encode_png(pixels: npt.NDArray[np.uint8], palette: npt.NDArray[np.uint8]) -> bytes:
    """Return a PNG of `pixels` (H, W), indices into `palette` (N, 3), of 8 bits."""
    from PIL import Image  # which a load without such images does without

    image, file = Image.fromarray(pixels), io.BytesIO()
    image.putpalette(palette.tobytes())
    image.save(file, "PNG", bits=8, compress_level=1)
    return file.getvalue()
