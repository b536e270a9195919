"""The items of a package: the item-side inputs of each, by item id, so that a request can name bare ids."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Dense, Input, range_of, range_text, tensor_names
from plait_disagg.graph.sample_inputs import picked
from plait_disagg.package.manifest import PackageError


@dataclass(frozen=True, kw_only=True)
class Items:
    """The items, where an item's id is its row.

    `features`: the item-side tensors of `tensor_names`, a row for each item (a bag's ids flat, with its offsets).
    `names`: display names of the items, or None.
    """

    features: Mapping[str, torch.Tensor]
    names: Sequence[str] | None = None


class StoredItems:
    """An `ItemStore` in memory. Raises ValueError, naming the input, if the features are not the model's."""

    def __init__(self, items: Items, inputs: Sequence[Input]) -> None:
        self._sides = tuple(item for item in inputs if item.side == "item")
        others = [
            f"{name} is {type(value).__name__}"
            for name, value in items.features.items()
            if not isinstance(value, torch.Tensor)
        ]
        if others:
            raise ValueError(f"items: {others[0]}, not a torch.Tensor")
        self._features = {name: tensor.contiguous() for name, tensor in items.features.items()}
        self._names = None if items.names is None else tuple(items.names)
        self._count = _check(self._features, self._sides)
        if self._names is not None and len(self._names) != self._count:
            raise ValueError(f"items: {len(self._names)} names for {self._count} items")
        others = [f"{i} is {name!r}" for i, name in enumerate(self._names or ()) if not isinstance(name, str)]
        if others:
            raise ValueError(f"items: the name of item {others[0]}, not a text")

    def __len__(self) -> int:
        return self._count

    def gather(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the item-side inputs of the items. `ids`: (N,) int64."""
        return picked(self._sides, self._features, ids)

    def names(self, ids: Sequence[int]) -> list[str] | None:
        """Return the items' names, or None if the package has none."""
        return None if self._names is None else [self._names[i] for i in ids]


def write_items(
    features_path: Path,
    names_path: Path,
    items: Items,
    inputs: Sequence[Input],
    id_rows: Mapping[str, int],
) -> int:
    """Write the files (names only if there are any); return the number of items.

    `id_rows`: from which id on a table would reject an input's. Raises ValueError as `StoredItems`, and for an item
    that no request could rank, naming input, item, number and bound.
    """
    stored = StoredItems(items, inputs)
    for item in inputs:
        if item.side == "item":
            _check_numbers(item, items.features, id_rows.get(item.name))
    save_tensors({name: tensor.contiguous() for name, tensor in items.features.items()}, features_path)
    if items.names is not None:
        text = json.dumps(list(items.names), ensure_ascii=False)
        names_path.write_text(text + "\n", encoding="utf-8")
    return len(stored)


def read_items(features_path: Path, names_path: Path, inputs: Sequence[Input]) -> StoredItems:
    """Load the items. Raises `PackageError` if the files are not what the model needs."""
    try:
        features = load_file(features_path)
        names = json.loads(names_path.read_text(encoding="utf-8")) if names_path.is_file() else None
        if names is not None and not isinstance(names, list):
            raise PackageError(f"{names_path} is not a list of names")
        return StoredItems(Items(features=features, names=names), inputs)
    except (OSError, SafetensorError, ValueError) as error:
        raise PackageError(f"{features_path}: {error}") from error


def _check(features: Mapping[str, torch.Tensor], sides: Sequence[Input]) -> int:
    wanted = tensor_names(sides)
    missing = [name for name in wanted if name not in features]
    extra = [name for name in features if name not in wanted]
    if missing or extra:
        word = f"{missing[0]} is missing" if missing else f"{extra[0]} is no item-side input"
        raise ValueError(f"items: {word}; the model takes {', '.join(wanted) or 'no item-side inputs'}")
    if not sides:
        raise ValueError("items: the model has no item-side inputs")
    counts = {item.name: _count(item, features) for item in sides}
    if len(set(counts.values())) > 1:
        raise ValueError(f"items: the inputs disagree about how many items there are: {counts}")
    return next(iter(counts.values()))


def _count(item: Input, features: Mapping[str, torch.Tensor]) -> int:
    """Return how many items an input's tensor has; check its dtype and shape."""
    tensor = features[item.name]
    dtype = torch.float32 if isinstance(item, Dense) else torch.int64
    if tensor.dtype is not dtype:
        raise ValueError(f"items: {item.name} is {tensor.dtype}, not {dtype}")
    if not isinstance(item, Bag):
        if tensor.shape[1:] != tuple(item.shape):
            raise ValueError(f"items: {item.name} has rows of shape {tuple(tensor.shape[1:])}, not {item.shape}")
        return tensor.shape[0]
    offsets = features[item.name + OFFSETS]
    lengths = offsets.diff()
    if (
        tensor.dim() != 1
        or offsets.dim() != 1
        or offsets.dtype is not torch.int64
        or len(offsets) < 1
        or int(offsets[0]) != 0
        or int(offsets[-1]) != len(tensor)
        or bool((lengths < 0).any())
    ):
        raise ValueError(f"items: {item.name}{OFFSETS} must go from 0 to {len(tensor)} without decreasing")
    if bool((lengths > item.largest).any()):
        longest = f"item {int(lengths.argmax())} has {int(lengths.max())} ids in {item.name}"
        raise ValueError(f"items: {longest}; this input takes at most {item.largest}")
    weights = features[item.name + WEIGHTS] if item.weighted else None
    if weights is not None and (weights.dtype is not torch.float32 or weights.shape != tensor.shape):
        raise ValueError(f"items: {item.name}{WEIGHTS} must have a float32 for each of {len(tensor)} ids")
    return len(offsets) - 1


def _check_numbers(item: Input, features: Mapping[str, torch.Tensor], rows: int | None) -> None:
    """Check for each number of an input what a request's would be checked for (`messages.check`)."""
    tensor = features[item.name]
    if isinstance(item, Dense):
        _refuse(item, item.name, features, ~tensor.isfinite(), "finite numbers")
    elif isinstance(item, Bag) and item.weighted:
        _refuse(item, item.name + WEIGHTS, features, ~features[item.name + WEIGHTS].isfinite(), "finite numbers")
    for first, last in (range_of(item), (None, None) if rows is None else (0, rows - 1)):
        bad = torch.zeros(tensor.shape, dtype=torch.bool)
        if first is not None:
            bad |= tensor < first
        if last is not None:
            bad |= tensor > last
        _refuse(item, item.name, features, bad, range_text(first, last))


def _refuse(item: Input, name: str, features: Mapping[str, torch.Tensor], bad: torch.Tensor, takes: str) -> None:
    """Raise ValueError for the first number that is bad, if there is one."""
    found = first_bad(bad, features.get(item.name + OFFSETS) if isinstance(item, Bag) else None)
    if found is not None:
        place, owner = found
        number = features[name].reshape(-1)[place].item()
        raise ValueError(f"items: {name} of item {owner} is {number}; this input takes {takes}")


def first_bad(bad: torch.Tensor, offsets: torch.Tensor | None) -> tuple[int, int] | None:
    """Return the place of the first number that is bad, and whose item it is; None if there is none.

    `bad`: a row for each item, or flat where each has its own by `offsets`.
    """
    if not bad.any():
        return None
    place = int(bad.reshape(-1).to(torch.uint8).argmax())
    if offsets is None:
        return place, place // bad[0].numel()
    return place, int(torch.searchsorted(offsets, place, right=True)) - 1


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the mode that the umask gives a new file; the library makes it its owner's own."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path)
    path.chmod(mode)
