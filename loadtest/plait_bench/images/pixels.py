"""Images over the pipe, and how much two systems' images differ."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plait_bench.benchmark import ResultRow
from plait_bench.errors import Disagreement
from plait_bench.fleet.values import ItemList, Json
from plait_bench.summary import summarise

# In fp32 the systems differ by rounding (batching, merged weights instead of a LoRA branch), which an image shows as
# a level here or there. A wrong scale, seed, scheduler or ControlNet shows as tens of levels in most images.
MAX_DIFFERENCE_LEVELS = 8

# In bf16 rounding alone is tens of levels at an edge: the mean over an image is judged.
MAX_MEAN_LEVELS = 8.0

_REFERENCES = ("diffusers", "diffusers_fair", "diffusers_batched")
"""Whose images the others must equal: that of the first that takes part."""


def encode(image: npt.NDArray[np.uint8]) -> Json:
    """Encode `uint8 (H, W, 3)` as JSON."""
    height, width, _ = image.shape
    return {"height": height, "width": width, "rgb": base64.b64encode(image.tobytes()).decode()}


def decode(value: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Decode an image made by `encode`."""
    data = base64.b64decode(value["rgb"], validate=True)
    return np.frombuffer(data, np.uint8).reshape(value["height"], value["width"], 3)


class PixelCheck:
    """Compares images within a dtype. A workload that is measured in several parts keeps its reference images."""

    def __init__(self, max_levels: int = MAX_DIFFERENCE_LEVELS) -> None:
        self._max_levels = max_levels
        self._kept: dict[str, tuple[str, Sequence[Json]]] = {}

    def __call__(self, workload: ItemList, results: Mapping[str, Sequence[Json]]) -> list[ResultRow]:
        """Return each system's largest difference to the reference by image, in levels of 255; in bf16 the mean
        difference.

        Raises `Disagreement` if an image differs by more than rounding, or if all the reference's images are one flat
        colour.
        """
        reference = next((name for name in _REFERENCES if name in results), "")
        if reference:
            self._kept.setdefault(workload.name, (reference, results[reference]))
        elif workload.name not in self._kept:
            reference = list(results)[-1]
        name, values = self._kept.get(workload.name) or (reference, results[reference])
        expected = [decode(value) for value in values]
        if all(int(image.max()) == int(image.min()) for image in expected):
            raise Disagreement(f"{workload.name}: {name} made flat images only; comparing them proves nothing")
        is_exact = workload.settings.get("dtype", "float32") == "float32"
        return [
            self._row(workload, system, name, _differences(images, expected, is_exact=is_exact), is_exact=is_exact)
            for system, images in results.items()
            if system != name
        ]

    def _row(
        self, workload: ItemList, system: str, reference: str, levels: Sequence[float], *, is_exact: bool
    ) -> ResultRow:
        limit = self._max_levels if is_exact else MAX_MEAN_LEVELS
        if max(levels) > limit:
            raise Disagreement(
                f"{workload.name}: image {levels.index(max(levels))} of {system} differs from {reference}'s "
                f"by {max(levels):.0f} levels of 255 (at most {limit:g} are rounding)"
            )
        spread = summarise(levels)
        return ResultRow(
            system=system, workload=workload.name,
            metric="largest_pixel_difference" if is_exact else "mean_pixel_difference", unit="levels of 255",
            value=max(levels), p20=spread.p20, p80=spread.p80, n=spread.n,
        )  # fmt: skip


def _differences(values: Sequence[Json], expected: Sequence[npt.NDArray[np.uint8]], *, is_exact: bool) -> list[float]:
    """Return the largest (or mean) difference of each image."""
    found = []
    for value, image in zip(values, expected, strict=True):
        levels = np.abs(decode(value).astype(np.int16) - image.astype(np.int16))
        found.append(float(levels.max() if is_exact else levels.mean()))
    return found
