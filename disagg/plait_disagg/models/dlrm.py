"""DLRM (Naumov et al., 2019, arXiv 1906.00091): embeddings and a bottom MLP, an interaction, a top MLP.

x = bottom(dense)                 (rows, d)
e_f = pooled embedding of f       (rows, d)   for F features
dot: [x, strictly lower triangle of Z Z^T],  Z = [x, e_1 .. e_F]    d + F (F + 1) / 2 wide
cat: [x, e_1 .. e_F]                                                (F + 1) d wide
score = sigmoid(top(...))         (rows,)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.models.layers import Sparse, mlp, tables_of

Interaction = Literal["dot", "cat"]


class Dlrm(nn.Module):
    """DLRM. `bottom`: widths from the dense input to d; `top`: hidden widths, without the input, ending with 1."""

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
        vectors = [x, *(embedded(self.tables, feature, ids) for feature in self.features)]
        if self.interaction == "cat":
            return _score(self.top, vectors)
        z = torch.stack(vectors, dim=1)
        products = torch.bmm(z, z.transpose(1, 2)).flatten(1)
        return _score(self.top, [x, products[:, self.pairs]])


def embedded(tables: nn.ModuleDict, feature: Sparse, ids: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the feature's vector, (rows, d)."""
    table = tables[feature.name]
    bag = (ids[feature.name + OFFSETS],) if feature.bag else ()
    made: torch.Tensor = table(ids[feature.name], *bag)
    return made


def _score(top: nn.Module, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    made: torch.Tensor = top(torch.cat(list(parts), dim=1))
    return made.squeeze(1)
