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


def encode(image: npt.NDArray[np.uint8]) -> Json:
    """Encode `uint8 (H, W, 3)` as JSON."""
    height, width, _ = image.shape
    return {"height": height, "width": width, "rgb": base64.b64encode(image.tobytes()).decode()}


def decode(value: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Decode an image made by `encode`."""
    data = base64.b64decode(value["rgb"], validate=True)
    return np.frombuffer(data, np.uint8).reshape(value["height"], value["width"], 3)


def check(
    workload: ItemList, results: Mapping[str, Sequence[Json]], *, largest: int = MAX_DIFFERENCE_LEVELS
) -> list[ResultRow]:
    """Return each system's largest difference to `diffusers` (or the last system) by image, in levels of 255.

    Raises `Disagreement` if an image differs by more than `largest`, or if all the reference's images are one flat
    colour.
    """
    reference = "diffusers" if "diffusers" in results else list(results)[-1]
    expected = [decode(value) for value in results[reference]]
    if all(int(image.max()) == int(image.min()) for image in expected):
        raise Disagreement(f"{workload.name}: {reference} made flat images only; comparing them proves nothing")
    rows = []
    for system, values in results.items():
        if system == reference:
            continue
        worst = [
            float(np.abs(decode(value).astype(np.int16) - image.astype(np.int16)).max())
            for value, image in zip(values, expected, strict=True)
        ]
        if max(worst) > largest:
            raise Disagreement(
                f"{workload.name}: image {worst.index(max(worst))} of {system} differs from {reference}'s "
                f"by {max(worst):.0f} levels of 255 (at most {largest} are rounding)"
            )
        spread = summarise(worst)
        rows.append(
            ResultRow(
                system=system, workload=workload.name, metric="largest_pixel_difference", unit="levels of 255",
                value=max(worst), p20=spread.p20, p80=spread.p80, n=spread.n,
            )
        )  # fmt: skip
    return rows
