"""Parts that the models share: MLPs, tables that are quick to fill, and the declaration of a sparse feature."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from plait_disagg.graph.inputs import Bag, Ids, Input, Side

_BLOCK_ROWS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """A categorical feature with a table of its own. `hot`: ids in a typical row; `bag` False: always exactly one."""

    name: str
    rows: int
    side: Side
    hot: int = 1
    bag: bool = True

    @property
    def input(self) -> Input:
        """The declaration of the feature as a model input."""
        if self.bag:
            return Bag(self.name, side=self.side)
        return Ids(self.name, side=self.side)


def mlp(
    widths: Sequence[int], *, last: type[nn.Module] | None = nn.ReLU, between: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Stack linear layers `widths[0] -> widths[1] -> ...` with `between` after all but the last and `last` after the
    last."""
    layers: list[nn.Module] = []
    for index, (given, made) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(given, made))
        activation = between if index < len(widths) - 2 else last
        if activation is not None:
            layers.append(activation())
    return nn.Sequential(*layers)


def tables_of(features: Sequence[Sparse], dim: int) -> nn.ModuleDict:
    """Make a sum-pooling `EmbeddingBag` for every bag and an `Embedding` for every single id, filled by `filled`."""
    made: dict[str, nn.Module] = {}
    for number, feature in enumerate(features):
        weight = filled(feature.rows, dim, seed=torch.initial_seed() + number)
        if feature.bag:
            made[feature.name] = nn.EmbeddingBag(
                feature.rows, dim, mode="sum", include_last_offset=True, _weight=weight
            )
        else:
            made[feature.name] = nn.Embedding(feature.rows, dim, _weight=weight)
    return nn.ModuleDict(made)


def filled(rows: int, dim: int, *, seed: int) -> torch.Tensor:
    """Return (rows, dim) float32, uniform in +-1 / sqrt(rows) as the DLRM reference initializes its tables.

    Only the first 65,536 rows are drawn, then repeated: a table of gigabytes is made at the speed of copying. For
    shapes and timing; training a model overwrites it.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.empty(min(rows, _BLOCK_ROWS), dim).uniform_(-(rows**-0.5), rows**-0.5, generator=generator)
    if rows <= _BLOCK_ROWS:
        return block
    weight = torch.empty(rows, dim)
    for first in range(0, rows, _BLOCK_ROWS):
        part = weight[first : first + _BLOCK_ROWS]
        part.copy_(block[: part.shape[0]])
    return weight
