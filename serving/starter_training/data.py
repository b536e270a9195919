"""Training images: emoji artwork from two npm packages, and the rule that chooses the concepts.

The rule, in order: the five categories in `CATEGORIES` (things, not faces, letters or flags), without clock
faces, money, mail and moons; a name of one to three plain words; artwork in both sets; then, until `count`
are left, of the two most alike images (16x16 means, Twemoji) one is removed: never one in `FAVOURED`, else the one
with the longer name.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from plait_serving.starter.references import SIDE_PX, pool

VERSION = "16.0.0"
PACKAGES = {"twemoji": "emoji-datasource-twitter", "noto": "emoji-datasource-google"}
FOLDERS = {"twemoji": "img/twitter/64", "noto": "img/google/64"}
CATEGORIES = ("Activities", "Animals & Nature", "Food & Drink", "Objects", "Travel & Places")
LEFT_OUT = ("time", "money", "mail", "game-symbol")
NAME = re.compile(r"[a-z]+([ -][a-z]+){0,2}")
FAVOURED = frozenset(
    {
        "red apple", "lemon", "banana", "pineapple", "watermelon", "strawberry", "hamburger", "doughnut",
        "cookie", "slice of pizza", "taco", "birthday cake", "guitar", "violin", "bicycle", "rocket",
        "octopus", "frog face", "rabbit face", "cat face", "sunflower", "cactus", "christmas tree",
        "snowman", "key", "crown",
    }
)  # fmt: skip
DEFAULT_COUNT = 320


class NpmUnavailableError(RuntimeError):
    """npm is absent, or the registry did not answer: training cannot get its images."""


@dataclass(frozen=True, kw_only=True)
class TrainingImages:
    """The training set: `names[i]` is drawn in `twemoji[i]` and `noto[i]` (`uint8[n, 64, 64, 3]`)."""

    names: tuple[str, ...]
    twemoji: NDArray[np.uint8]
    noto: NDArray[np.uint8]


def fetch_package(name: str, cache: Path) -> Path:
    """Return the package's archive in `cache`, downloading it with `npm pack` if it is missing.

    Raises `NpmUnavailableError`.
    """
    archive = cache / f"{name}-{VERSION}.tgz"
    if archive.exists():
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", f"{name}@{VERSION}", "--silent"]
    try:
        subprocess.run(command, cwd=cache, capture_output=True, text=True, timeout=600, check=True)
    except FileNotFoundError as error:
        raise NpmUnavailableError("npm is not installed; training needs it to fetch the emoji artwork") from error
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or error
        raise NpmUnavailableError(f"npm pack {name} failed: {str(said).strip()[-300:]}") from error
    return archive


def _on_white(raw: bytes) -> NDArray[np.uint8]:
    """Decode one PNG and lay it on white, `uint8[64, 64, 3]`."""
    with Image.open(io.BytesIO(raw)) as opened:
        image = opened.convert("RGBA")
    if image.size != (SIDE_PX, SIDE_PX):
        image = image.resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(white, image).convert("RGB"))


def _read_archive(archive: Path, folder: str) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return `emoji.json` and the PNG bytes of `folder`, by file name."""
    files: dict[str, bytes] = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.name.startswith(("package/emoji.json", f"package/{folder}/")) and (
                file := tar.extractfile(member)
            ):
                files[member.name.removeprefix(f"package/{folder}/")] = file.read()
    return json.loads(files.pop("package/emoji.json")), files


def _candidates(entries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (name, image file) of every emoji that the rule admits before look-alikes are removed."""
    found: dict[str, str] = {}
    for entry in sorted(entries, key=lambda e: int(e["sort_order"])):
        name = str(entry["name"]).lower()
        admitted = (
            entry["category"] in CATEGORIES
            and entry["subcategory"] not in LEFT_OUT
            and entry["has_img_twitter"]
            and entry["has_img_google"]
            and NAME.fullmatch(name) is not None
            and "moon" not in name
        )
        if admitted:
            found.setdefault(name, str(entry["image"]))
    return list(found.items())


def drop_look_alikes(names: list[str], means: NDArray[np.uint8], count: int) -> list[int]:
    """Return the indices that remain when, of the closest pair, the longer name is removed until `count` are left."""
    flat = means.reshape(len(names), -1).astype(np.float64)
    squares = (flat**2).sum(1)
    distance = squares[:, None] + squares[None, :] - 2 * flat @ flat.T
    favoured = np.array([name in FAVOURED for name in names])
    distance[favoured[:, None] & favoured[None, :]] = np.inf
    np.fill_diagonal(distance, np.inf)
    left = set(range(len(names)))
    while len(left) > count:
        first, second = (int(i) for i in np.unravel_index(np.argmin(distance), distance.shape))
        dropped = max(first, second, key=lambda i: (names[i] not in FAVOURED, len(names[i].split()), len(names[i]), i))
        distance[dropped, :] = distance[:, dropped] = np.inf
        left.remove(dropped)
    return sorted(left)


def load_images(cache: Path, count: int = DEFAULT_COUNT) -> TrainingImages:
    """Return the training set, of npm's archives in `cache` (a few seconds). Raises `NpmUnavailableError`."""
    archives = {style: fetch_package(package, cache) for style, package in PACKAGES.items()}
    entries, twemoji = _read_archive(archives["twemoji"], FOLDERS["twemoji"])
    _, noto = _read_archive(archives["noto"], FOLDERS["noto"])
    pairs = [(name, image) for name, image in _candidates(entries) if image in twemoji and image in noto]
    all_twemoji = np.stack([_on_white(twemoji[image]) for _, image in pairs])
    stay = drop_look_alikes([name for name, _ in pairs], pool(all_twemoji), count)
    return TrainingImages(
        names=tuple(pairs[i][0] for i in stay),
        twemoji=all_twemoji[stay],
        noto=np.stack([_on_white(noto[pairs[i][1]]) for i in stay]),
    )
