"""Control maps that need no image: a numbered line drawing, or its colours."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw


def control_map(controlnet: str, drawing: int, width: int, height: int) -> npt.NDArray[np.uint8]:
    """Return `uint8 (height, width, 3)`: white lines on black, or coloured blocks for `colors`. Same numbers, same
    map."""
    image = Image.new("RGB", (width, height))
    pen = ImageDraw.Draw(image)
    inset = 0.1 + 0.05 * (drawing % 4)
    box = (inset * width, inset * height, (1 - inset) * width, (1 - inset) * height)
    coloured = controlnet == "colors"
    fill = (60 + 45 * (drawing % 5), 200 - 30 * (drawing % 6), 90 + 20 * (drawing % 8)) if coloured else None
    shape = pen.ellipse if drawing % 2 else pen.rectangle
    shape(box, fill=fill, outline=None if coloured else (255, 255, 255))
    if not coloured:
        return np.asarray(image)
    blocks = image.resize((4, 4), Image.Resampling.BOX).resize((width, height), Image.Resampling.NEAREST)
    return np.asarray(blocks)
