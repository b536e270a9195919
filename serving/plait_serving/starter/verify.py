"""Measures whether the starter models do what they are for. Pure: images come from a function.

Images are compared as 16x16 mean colours in 0..255. Which concepts are tested follows from the sha256 of their
names, and the seed is the position in that order; every image is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from plait_serving.starter.preprocess import PIXEL_BLOCK_PX, ImageArray, block_means, edge_mask, unblock
from plait_serving.starter.references import References, pool

STEPS = 20
RECOGNITION_COUNT = 200
CONTROL_COUNT = 50
NOTO_COUNT = 100
STYLE_COUNT = 50


@dataclass(frozen=True, kw_only=True)
class VerificationImage:
    """One image to make: 64x64, in `STEPS`, a LoRA at its full scale, the rest at the server's defaults."""

    prompt: str
    seed: int
    controlnet: str | None = None
    control_image: ImageArray | None = None
    lora: str | None = None


Generate = Callable[[Sequence[VerificationImage]], list[ImageArray]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured value and the bound that it must keep."""

    name: str
    value: float
    bound: Literal[">=", "<="]
    threshold: float
    count: int
    meaning: str

    @property
    def passed(self) -> bool:
        """Whether the value keeps its bound."""
        return self.value >= self.threshold if self.bound == ">=" else self.value <= self.threshold


def _vectors(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    return images.reshape(len(images), -1).astype(np.float64)


def ranks(made: NDArray[np.uint8], references: NDArray[np.uint8], rows: Sequence[int]) -> NDArray[np.int64]:
    """Return how many references are nearer to image `k` than its own, `rows[k]`; both `uint8[., 16, 16, 3]`."""
    a, b = _vectors(made), _vectors(references)
    distance = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    own = distance[np.arange(len(a)), list(rows)]
    return np.asarray((distance < own[:, None]).sum(1), dtype=np.int64)


def nearer(made: NDArray[np.uint8], wanted: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Return the share of images that are nearer to their row of `wanted` than to their row of `other`."""
    a, b, c = _vectors(made), _vectors(wanted), _vectors(other)
    return float((((a - b) ** 2).sum(1) < ((a - c) ** 2).sum(1)).mean())


def edge_f1(found: NDArray[np.bool_], wanted: NDArray[np.bool_]) -> float:
    """Return the F1 of two line maps where a line one pixel off still counts; 1 if both are empty."""
    if not found.any() and not wanted.any():
        return 1.0
    around = np.ones((3, 3), dtype=bool)
    precision = (found & ndimage.binary_dilation(wanted, around)).sum() / max(1, found.sum())
    recall = (wanted & ndimage.binary_dilation(found, around)).sum() / max(1, wanted.sum())
    return float(2 * precision * recall / max(1e-9, precision + recall))


def unevenness(image: ImageArray) -> float:
    """Return the root mean square difference between an image and its 8x8-pixel blocks, 0 for perfect blocks."""
    flat = unblock(block_means(image, PIXEL_BLOCK_PX), PIXEL_BLOCK_PX, image.shape[0], image.shape[1])
    return float(np.sqrt(((image.astype(np.float64) - flat) ** 2).mean()))


def _recognition(_: Generate, refs: References, plain: list[ImageArray], rows: list[int]) -> list[Figure]:
    rank = ranks(pool(np.stack(plain)), refs.twemoji, rows)
    meaning = "share of prompts whose image is nearest to (or has among its five nearest) the right training image"
    top1, top5 = float((rank < 1).mean()), float((rank < 5).mean())
    return [
        Figure(name="recognition_top1", value=top1, bound=">=", threshold=0.60, count=len(rows), meaning=meaning),
        Figure(name="recognition_top5", value=top5, bound=">=", threshold=0.85, count=len(rows), meaning=meaning),
    ]


def _controlled(
    generate: Generate, refs: References, rows: list[int], net: Literal["edges", "colors"]
) -> tuple[list[int], list[ImageArray]]:
    """Return images of the first concepts, made with the control maps of others, and the others' rows."""
    rows, sources = rows[:CONTROL_COUNT], other_rows(rows)[:CONTROL_COUNT]
    control_map = refs.edge_map if net == "edges" else refs.color_map
    orders = [
        VerificationImage(prompt=refs.names[row], seed=seed, controlnet=net, control_image=control_map(source))
        for seed, (row, source) in enumerate(zip(rows, sources, strict=True))
    ]
    return sources, generate(orders)


def _edges(generate: Generate, refs: References, plain: list[ImageArray], rows: list[int]) -> list[Figure]:
    sources, made = _controlled(generate, refs, rows, "edges")
    got = np.mean([edge_f1(edge_mask(p), refs.edges[s]) for p, s in zip(made, sources, strict=True)])
    without = np.mean([edge_f1(edge_mask(p), refs.edges[s]) for p, s in zip(plain, sources, strict=False)])
    count, meaning = len(made), "mean F1 of the image's lines against the map of another concept, one pixel tolerance"
    gain = float(got - without)
    return [
        Figure(name="edges_f1", value=float(got), bound=">=", threshold=0.65, count=count, meaning=meaning),
        Figure(name="edges_f1_gain", value=gain, bound=">=", threshold=0.25, count=count, meaning="minus without"),
    ]


def _colors(generate: Generate, refs: References, plain: list[ImageArray], rows: list[int]) -> list[Figure]:
    sources, made = _controlled(generate, refs, rows, "colors")
    wanted, count = _vectors(refs.twemoji[sources]), len(made)
    got, without = (np.abs(_vectors(pool(np.stack(images))) - wanted).mean() for images in (made, plain[:count]))
    meaning = "error of the 4x4-block means against another concept's, over the error without the ControlNet"
    value = float(got / without)
    return [Figure(name="colors_error", value=value, bound="<=", threshold=0.5, count=count, meaning=meaning)]


def _styled(generate: Generate, refs: References, rows: list[int], lora: str) -> list[ImageArray]:
    return generate([VerificationImage(prompt=refs.names[row], seed=seed, lora=lora) for seed, row in enumerate(rows)])


def _noto(generate: Generate, refs: References, plain: list[ImageArray], rows: list[int]) -> list[Figure]:
    rows = rows[:NOTO_COUNT]
    noto, twemoji, count = refs.noto[rows], refs.twemoji[rows], len(rows)
    got = nearer(pool(np.stack(_styled(generate, refs, rows, "noto"))), noto, twemoji)
    without = nearer(pool(np.stack(plain[:count])), noto, twemoji)
    meaning = "share of images nearer to the concept's Noto artwork than to its Twemoji artwork"
    return [
        Figure(name="noto_share", value=got, bound=">=", threshold=0.65, count=count, meaning=meaning),
        Figure(name="noto_share_without", value=without, bound="<=", threshold=0.25, count=count, meaning=meaning),
    ]


def _sketch(generate: Generate, refs: References, _: list[ImageArray], rows: list[int]) -> list[Figure]:
    rows = rows[:STYLE_COUNT]
    drawn = np.repeat(refs.sketch[rows][..., None], 3, axis=3)
    share = nearer(pool(np.stack(_styled(generate, refs, rows, "sketch"))), drawn, refs.twemoji[rows])
    meaning = "share of images nearer to the concept's line drawing than to its Twemoji artwork"
    return [Figure(name="sketch_share", value=share, bound=">=", threshold=0.8, count=len(rows), meaning=meaning)]


def _pixel(generate: Generate, refs: References, plain: list[ImageArray], rows: list[int]) -> list[Figure]:
    rows = rows[:STYLE_COUNT]
    got = np.mean([unevenness(p) for p in _styled(generate, refs, rows, "pixel")])
    without = np.mean([unevenness(p) for p in plain[: len(rows)]])
    meaning = "unevenness within 8x8-pixel blocks, over the unevenness without the LoRA"
    value = float(got / without)
    return [Figure(name="pixel_unevenness", value=value, bound="<=", threshold=0.5, count=len(rows), meaning=meaning)]


def other_rows(rows: list[int]) -> list[int]:
    """Return another row for each row: the list rotated by half of its length."""
    half = len(rows) // 2
    return [*rows[half:], *rows[:half]]


PARTS = {"recognition": _recognition, "edges": _edges, "colors": _colors, "noto": _noto, "sketch": _sketch,
         "pixel": _pixel}  # fmt: skip


def verify(
    generate: Generate, references: References, *, parts: Sequence[str] = tuple(PARTS), limit: int | None = None
) -> dict[str, Any]:
    """Measure `parts` and return `{"passed": bool, "figures": [{name, value, bound, threshold, passed, ...}]}`.

    `limit` lowers the number of concepts, for a quick look.
    """
    rows = references.hash_order()[: limit or RECOGNITION_COUNT]
    plain = generate([VerificationImage(prompt=references.names[row], seed=seed) for seed, row in enumerate(rows)])
    figures = [figure for part in parts for figure in PARTS[part](generate, references, plain, rows)]
    return {
        "passed": all(figure.passed for figure in figures),
        "steps": STEPS,
        "figures": [asdict(figure) | {"passed": figure.passed} for figure in figures],
    }
