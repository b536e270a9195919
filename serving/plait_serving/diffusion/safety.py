"""The safety checker of a folder that has one: flagged images are made black, like in diffusers' pipelines."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from PIL import Image

from plait_serving.diffusion.bundle import Bundle
from plait_serving.diffusion.decoding import to_rgb

_log = logging.getLogger(__name__)


class FolderSafetyChecker:
    """A `SafetyChecker` with diffusers' `StableDiffusionSafetyChecker`. Decode thread only."""

    def __init__(self, checker: Any, feature_extractor: Any) -> None:
        self._checker = checker
        self._feature_extractor = feature_extractor

    def check(self, images: torch.Tensor) -> tuple[torch.Tensor, tuple[bool, ...]]:
        """Return a copy of `float (n, 3, H, W)` in [0, 1] with flagged images black, and the flags."""
        with torch.inference_mode():
            pil_images = [Image.fromarray(image) for image in to_rgb(images)]
            pixels = self._feature_extractor(pil_images, return_tensors="pt").pixel_values
            parameter = next(self._checker.parameters())
            checked, flags = self._checker(
                images=images.clone(), clip_input=pixels.to(device=parameter.device, dtype=parameter.dtype)
            )
        return cast("torch.Tensor", checked), tuple(bool(flag) for flag in flags)


def safety_of(bundle: Bundle) -> FolderSafetyChecker | None:
    """Return the bundle's checker, or None with a line in the log: the folder has none or it was switched off."""
    if bundle.safety_checker is None:
        _log.info("%s: no safety checker", bundle.folder)
        return None
    return FolderSafetyChecker(bundle.safety_checker, bundle.feature_extractor)
