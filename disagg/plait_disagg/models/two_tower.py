"""Two towers: user features to a vector, item features to a vector; the score is their dot product.

The user tower runs once per request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from plait_disagg.models.dlrm import embedded
from plait_disagg.models.layers import Sparse, mlp, tables_of


class TwoTower(nn.Module):
    """A two-tower model. `tower`: widths after the concatenated embeddings and numbers of a side."""

    def __init__(
        self, features: Sequence[Sparse], *, dim: int, user_dense: int, item_dense: int, tower: Sequence[int]
    ) -> None:
        super().__init__()
        self.user_features = tuple(feature for feature in features if feature.side == "user")
        self.item_features = tuple(feature for feature in features if feature.side == "item")
        self.tables = tables_of(features, dim)
        self.user_tower = mlp((user_dense + dim * len(self.user_features), *tower), last=None)
        self.item_tower = mlp((item_dense + dim * len(self.item_features), *tower), last=None)

    def forward(self, user_dense: torch.Tensor, item_dense: torch.Tensor, **ids: torch.Tensor) -> torch.Tensor:
        """Return scores (rows,), any real number. `user_dense`: (rows, .); `item_dense`: (rows, .)."""
        user = [user_dense, *(embedded(self.tables, feature, ids) for feature in self.user_features)]
        item = [item_dense, *(embedded(self.tables, feature, ids) for feature in self.item_features)]
        u: torch.Tensor = self.user_tower(torch.cat(user, dim=1))
        v: torch.Tensor = self.item_tower(torch.cat(item, dim=1))
        return (u * v).sum(dim=1)
