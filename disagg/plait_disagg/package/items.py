"""The items of a package: the item-side inputs of each, by item id, so that a request can name bare ids."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from plait_disagg.errors import BadInput
from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Input
from plait_disagg.graph.sample_inputs import picked
from plait_disagg.messages.check import check_request
from plait_disagg.package.manifest import PackageError
from plait_disagg.values import ModelCard


@dataclass(frozen=True, kw_only=True)
class Items:
    """The items, where an item's id is its row.

    `features`: the item-side tensors of `tensor_names`, a row for each item (a bag's ids flat, with its offsets).
    `names`: display names of the items, or None.
    """

    features: Mapping[str, torch.Tensor]
    names: Sequence[str] | None = None


class StoredItems:
    """An `ItemStore` in memory."""

    def __init__(self, items: Items, inputs: Sequence[Input], id_rows: Mapping[str, int] | None = None) -> None:
        """`id_rows`: from which id on a table would reject an input's. Raises ValueError, naming the input, if the
        features are not the model's, and for an item that no request could rank, naming item, number and bound."""
        self._sides = tuple(item for item in inputs if item.side == "item")
        others = [
            f"{name} is {type(value).__name__}"
            for name, value in items.features.items()
            if not isinstance(value, torch.Tensor)
        ]
        if others:
            raise ValueError(f"items: {others[0]}, not a torch.Tensor")
        self._features = {name: tensor.detach().contiguous() for name, tensor in items.features.items()}
        self._names = None if items.names is None else tuple(items.names)
        self._count = _checked(self._features, self._sides, id_rows or {})
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
    """Write the files (names only if there are any); return the number of items. Raises ValueError as `StoredItems`
    does."""
    stored = StoredItems(items, inputs, id_rows)
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
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise PackageError(f"{features_path}: {error}") from error


def _checked(features: Mapping[str, torch.Tensor], sides: Sequence[Input], id_rows: Mapping[str, int]) -> int:
    """Check the items as the candidates of one request would be; return how many there are."""
    if not sides:
        raise ValueError("items: the model has no item-side inputs")
    card = ModelCard(
        name="items", version="", inputs=tuple(sides), outputs={}, largest_candidates=sys.maxsize, id_rows=id_rows
    )
    try:
        return check_request(card, features, request_id="").candidates
    except BadInput as bad:
        if bad.place is None or bad.param is None:
            raise ValueError(f"items: {bad}") from bad
        numbers, of = features[bad.param], features.get(bad.param.removesuffix(WEIGHTS) + OFFSETS)
        raise ValueError(f"items: {bad} (of item {owner_of(bad.place, numbers, of)})") from bad


def owner_of(place: int, numbers: torch.Tensor, offsets: torch.Tensor | None) -> int:
    """Return whose item the number at that place (flat) is. `numbers`: a row for each item, or flat where each has its
    own by `offsets`."""
    if offsets is None:
        return place // numbers[0].numel()
    return int(torch.searchsorted(offsets, place, right=True)) - 1


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the mode that the umask gives a new file; the library makes it its owner's own."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path)
    path.chmod(mode)
