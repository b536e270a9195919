"""What a ControlNet is asked, wherever it runs: a request's constants, and its rows in a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.protocols import Conditioning, ControlCall
from plait_serving.diffusion.values import RgbImage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constants:
    """What does not change from step to step: `embedding (1, E, h, w)` of the control image, and the text. `request`:
    whose they are, for the log."""

    embedding: torch.Tensor
    conditioning: Conditioning
    request: str = ""

    @property
    def rows(self) -> int:
        """R: the number of images times branches."""
        return int(self.conditioning.text.shape[0]) * self.conditioning.n


def batch_key(call: ControlCall) -> Hashable:
    """Return a key; calls with equal keys can share one forward pass."""
    text, added = call.session.conditioning.text, call.session.conditioning.added
    shapes = tuple(sorted((name, tuple(value.shape[1:]), value.dtype) for name, value in added.items()))
    return tuple(call.sample.shape[1:]), call.sample.dtype, tuple(text.shape[1:]), text.dtype, shapes


def check_image(image: RgbImage) -> None:
    """Raise `RequestError` for an image that is not `uint8 (H, W, 3)`."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise RequestError(f"a control image must be uint8 (H, W, 3), not {image.dtype} {image.shape}", param="image")
