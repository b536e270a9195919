"""The weight files of one part of a model's folder, as their headers describe them: no tensor is read.

What is missing, cut off, pickled or no float is reported here, by the name of the file, before anything is loaded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait_serving.diffusion.errors import LoraError, ModelError
from plait_serving.diffusion.lora.container import TensorInfo, inspect
from plait_serving.diffusion.sources.names import NOWHERE

if TYPE_CHECKING:
    import torch

_STEMS = ("diffusion_pytorch_model", "model")
_SHARD = re.compile(r"-\d+-of-\d+$")
_FLOATS: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
MAX_FILE_BYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """One set of safetensors files, in order. `tensors` says what is in which of them."""

    folder: Path
    variant: str | None
    files: tuple[Path, ...]
    tensors: Mapping[str, tuple[Path, TensorInfo]]

    @property
    def nbytes(self) -> int:
        """The size of the tensors in the files."""
        return sum(info.end - info.begin for _, info in self.tensors.values())

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of all tensors; float32 if they differ."""
        import torch

        found = {info.dtype for _, info in self.tensors.values()}
        stored = {"F16": torch.float16, "BF16": torch.bfloat16}
        return stored.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32

    def nbytes_as(self, dtype: torch.dtype) -> int:
        """Return the size of the tensors in memory once the floating-point ones have been cast to `dtype`."""
        return sum(
            math.prod(info.shape) * dtype.itemsize if info.dtype in _FLOATS else info.end - info.begin
            for _, info in self.tensors.values()
        )


def find_weights(folder: Path) -> WeightFiles:
    """Return the weights in a folder: the plain set, or else its only variant (`fp16` of `model.fp16.safetensors`).

    Raises `ModelError` if there is none, a shard is missing, a file is damaged or a weight is not a float.
    """
    variant = _variant(folder)
    files = _files(folder, "" if variant is None else f".{variant}")
    tensors = {name: (path, info) for path in files for name, info in _tensors(path).items()}
    return WeightFiles(folder=folder, variant=variant, files=files, tensors=tensors)


def _variant(folder: Path) -> str | None:
    names = [path.name.removesuffix(".safetensors") for path in folder.glob("*.safetensors")]
    indices = folder.glob("*.safetensors.index*.json")
    names += [path.name.replace(".safetensors.index", "").removesuffix(".json") for path in indices]
    parts = [_SHARD.sub("", name).partition(".") for name in names]
    variants = {variant for stem, _, variant in parts if stem in _STEMS}
    if "" in variants:
        return None
    if len(variants) == 1:
        return variants.pop()
    if not variants and any(folder.glob("*.bin")):
        raise ModelError(f"{folder}: has pickled weights (.bin) only; safetensors is needed")
    raise ModelError(f"{folder}: no weights found ({' or '.join(f'{stem}.safetensors' for stem in _STEMS)})")


def _files(folder: Path, suffix: str) -> tuple[Path, ...]:
    """Return the whole file or the shards of an index."""
    for stem in _STEMS:
        whole, index = folder / f"{stem}{suffix}.safetensors", folder / f"{stem}.safetensors.index{suffix}.json"
        if whole.is_file():
            return (whole,)
        if index.is_file():
            return _shards(index)
        if whole.is_symlink():
            raise ModelError(f"{whole}: {NOWHERE}")
        if any(folder.glob(f"{stem}{suffix}-*-of-*.safetensors")):
            raise ModelError(f"{index}: missing, though there are shards")
    raise ModelError(f"{folder}: no weights found that plait can read")


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in table.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a readable index of shards ({error})") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"{index}: {outside[0]} is not a file of its folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more of {len(names)} shards" if len(missing) > 1 else ""
        raise ModelError(f"{index.parent / missing[0]}{more}: missing, though {index.name} names it")
    return tuple(index.parent / name for name in names)


def _tensors(path: Path) -> Mapping[str, TensorInfo]:
    try:
        tensors = inspect(path, max_bytes=MAX_FILE_BYTES).tensors
    except LoraError as error:
        raise ModelError(f"{path}: {error.message}") from error
    for name, info in tensors.items():
        # Old text encoders carry position_ids, a constant that newer code computes.
        if info.dtype not in _FLOATS and not name.endswith("position_ids"):
            raise ModelError(f"{path}: {name} is {info.dtype}; weights must be F16, BF16 or F32")
    return tensors
