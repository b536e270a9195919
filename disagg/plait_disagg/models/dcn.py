"""DCNv2 as MLPerf runs it (Wang et al., 2021, arXiv 2008.13535; facebookresearch/dlrm, torchrec_dlrm).

x_0 = [bottom(dense), e_1 .. e_F]                      ((F + 1) d wide)
x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l            V_l to `rank`, W_l back
score = sigmoid(over(x_L))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from plait_disagg.models.dlrm import embedded
from plait_disagg.models.layers import Sparse, mlp, tables_of


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
    """DCNv2. `bottom`: widths from the dense input to d; `over`: hidden widths, without the input, ending with 1."""

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
        vectors = [self.bottom(dense), *(embedded(self.tables, feature, ids) for feature in self.features)]
        made: torch.Tensor = self.over(self.cross(torch.cat(vectors, dim=1)))
        return made.squeeze(1)
