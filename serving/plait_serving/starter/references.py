"""What the starter models are compared with: small images and control maps of every concept.

`references.npz` holds `twemoji` and `noto` (`uint8[n, 16, 16, 3]`, means of 4x4 pixels), `sketch` (`uint8[n, 16,
16]`, grey) and `edges` (`uint8[n, 64, 8]`, eight pixels of the map to a byte). The `colors` map of a concept is its
`twemoji` entry, enlarged four times.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plait_serving.starter.preprocess import COLOR_BLOCK_PX, ImageArray, block_means, edge_mask, sketch, unblock

SIDE_PX = 64
_ARRAYS = ("twemoji", "noto", "sketch")
"""Those that are stored as they are."""


@dataclass(frozen=True, kw_only=True)
class References:
    """Row `i` of every array belongs to `names[i]`; shapes as in the module's docstring, `edges` unpacked."""

    names: tuple[str, ...]
    twemoji: NDArray[np.uint8]
    noto: NDArray[np.uint8]
    sketch: NDArray[np.uint8]
    edges: NDArray[np.bool_]

    def hash_order(self) -> list[int]:
        """Return all rows, ordered by the sha256 of their name: a fixed choice that nobody made by hand."""
        return sorted(range(len(self.names)), key=lambda i: hashlib.sha256(self.names[i].encode()).digest())

    def edge_map(self, row: int) -> ImageArray:
        """Return the control image of `edges` for this concept, `uint8[64, 64, 3]`."""
        return np.repeat(self.edges[row][..., None].astype(np.uint8) * np.uint8(255), 3, axis=2)

    def color_map(self, row: int) -> ImageArray:
        """Return the control image of `colors` for this concept, `uint8[64, 64, 3]`."""
        return unblock(self.twemoji[row].astype(np.float64), COLOR_BLOCK_PX, SIDE_PX, SIDE_PX)


def pool(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the 16x16 mean colours of `uint8[n, 64, 64, 3]`."""
    return np.stack([np.rint(block_means(p, SIDE_PX // 16)).astype(np.uint8) for p in images])


def make_references(names: tuple[str, ...], twemoji: NDArray[np.uint8], noto: NDArray[np.uint8]) -> References:
    """Return the references of a training set given as `uint8[n, 64, 64, 3]`."""
    return References(
        names=names,
        twemoji=pool(twemoji),
        noto=pool(noto),
        sketch=pool(np.stack([sketch(p) for p in twemoji]))[..., 0],
        edges=np.stack([edge_mask(p) for p in twemoji]),
    )


def save_references(references: References, folder: Path) -> None:
    """Write `concepts.json` and `references.npz`."""
    names = json.dumps(list(references.names), indent=0)
    (folder / "concepts.json").write_text(names + "\n", encoding="utf-8")
    arrays = {name: getattr(references, name) for name in _ARRAYS}
    np.savez_compressed(folder / "references.npz", **arrays, edges=np.packbits(references.edges, axis=2))


def load_references(folder: Path) -> References:
    """Read what `save_references` wrote."""
    names = tuple(json.loads((folder / "concepts.json").read_text(encoding="utf-8")))
    with np.load(folder / "references.npz") as stored:
        arrays = {name: stored[name] for name in _ARRAYS}
        return References(names=names, **arrays, edges=np.unpackbits(stored["edges"], axis=2).astype(np.bool_))
