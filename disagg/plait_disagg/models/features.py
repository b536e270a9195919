"""Models over the pooled embeddings of their features: DLRM, DCNv2 and two towers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.models.layers import Sparse, mlp, tables_of

Interaction = Literal["dot", "cat"]


class Dlrm(nn.Module):
    """DLRM (Naumov et al., 2019, arXiv 1906.00091): embeddings and a bottom MLP, an interaction, a top MLP.

    x = bottom(dense)                 (rows, d)
    e_f = pooled embedding of f       (rows, d)   for F features
    dot: [x, strictly lower triangle of Z Z^T],  Z = [x, e_1 .. e_F]    d + F (F + 1) / 2 wide
    cat: [x, e_1 .. e_F]                                                (F + 1) d wide
    score = sigmoid(top(...))         (rows,)

    `bottom`: widths from the dense input to d; `top`: hidden widths, without the input, ending with 1.
    """

    pairs: torch.Tensor

    def __init__(
        self,
        features: Sequence[Sparse],
        *,
        dim: int,
        bottom: Sequence[int],
        top: Sequence[int],
        interaction: Interaction,
    ) -> None:
        super().__init__()
        self.features = tuple(features)
        self.tables = tables_of(features, dim)
        self.bottom = mlp(bottom)
        self.interaction = interaction
        fields = len(features) + 1
        lower = torch.tril_indices(fields, fields, offset=-1)
        self.register_buffer("pairs", lower[0] * fields + lower[1], persistent=False)
        width = dim + fields * (fields - 1) // 2 if interaction == "dot" else fields * dim
        self.top = mlp((width, *top), last=nn.Sigmoid)

    def forward(self, dense: torch.Tensor, **ids: torch.Tensor) -> torch.Tensor:
        """Return scores (rows,) in 0..1. `dense`: (rows, bottom[0]); `ids` as named by `plait_disagg.graph.inputs`."""
        x = self.bottom(dense)
        vectors = [x, *(_embedded(self.tables, feature, ids) for feature in self.features)]
        if self.interaction == "cat":
            return _score(self.top, vectors)
        z = torch.stack(vectors, dim=1)
        products = torch.bmm(z, z.transpose(1, 2)).flatten(1)
        return _score(self.top, [x, products[:, self.pairs]])


class LowRankCross(nn.Module):
    """A stack of `layers` cross layers of width `width` through `rank`."""

    def __init__(self, width: int, *, layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        """Map (rows, width) to (rows, width)."""
        x = x0
        for down, up in zip(self.down, self.up, strict=True):
            x = x0 * up(down(x)) + x
        return x


class Dcn(nn.Module):
    """DCNv2 as MLPerf runs it (Wang et al., 2021, arXiv 2008.13535; facebookresearch/dlrm, torchrec_dlrm).

    x_0 = [bottom(dense), e_1 .. e_F]                      ((F + 1) d wide)
    x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l            V_l to `rank`, W_l back
    score = sigmoid(over(x_L))

    `bottom`: widths from the dense input to d; `over`: hidden widths, without the input, ending with 1.
    """

    def __init__(
        self,
        features: Sequence[Sparse],
        *,
        dim: int,
        bottom: Sequence[int],
        over: Sequence[int],
        layers: int,
        rank: int,
    ) -> None:
        super().__init__()
        self.features = tuple(features)
        self.tables = tables_of(features, dim)
        self.bottom = mlp(bottom)
        width = (len(features) + 1) * dim
        self.cross = LowRankCross(width, layers=layers, rank=rank)
        self.over = mlp((width, *over), last=nn.Sigmoid)

    def forward(self, dense: torch.Tensor, **ids: torch.Tensor) -> torch.Tensor:
        """Score the rows; arguments and result are those of `Dlrm.forward`."""
        vectors = [self.bottom(dense), *(_embedded(self.tables, feature, ids) for feature in self.features)]
        made: torch.Tensor = self.over(self.cross(torch.cat(vectors, dim=1)))
        return made.squeeze(1)


class TwoTower(nn.Module):
    """Two towers: user features to a vector, item features to a vector; the score is their dot product.

    The user tower runs once per request. `tower`: widths after the concatenated embeddings and numbers of a side.
    """

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
        user = [user_dense, *(_embedded(self.tables, feature, ids) for feature in self.user_features)]
        item = [item_dense, *(_embedded(self.tables, feature, ids) for feature in self.item_features)]
        u: torch.Tensor = self.user_tower(torch.cat(user, dim=1))
        v: torch.Tensor = self.item_tower(torch.cat(item, dim=1))
        return (u * v).sum(dim=1)


def _embedded(tables: nn.ModuleDict, feature: Sparse, ids: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the feature's vector, (rows, d)."""
    table = tables[feature.name]
    bag = (ids[feature.name + OFFSETS],) if feature.bag else ()
    made: torch.Tensor = table(ids[feature.name], *bag)
    return made


def _score(top: nn.Module, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    made: torch.Tensor = top(torch.cat(list(parts), dim=1))
    return made.squeeze(1)
