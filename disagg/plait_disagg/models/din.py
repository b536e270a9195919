"""DIN (Zhou et al., 2018, arXiv 1706.06978): the target item attends to the user's history.

    h_t = item embedding + category embedding of step t     (rows, T, 2 d)   user-side: crosses once a request
    v   = the same of the candidate                         (rows, 2 d)
    a_t = unit([h_t, v, h_t - v, h_t * v])                  not normalised, 0 where the history is padding (id 0)
    score = sigmoid(top([sum_t a_t h_t, v, user embedding]))

The dense half is heavy: the unit runs for every candidate and every step.
"""

from __future__ import annotations

import torch
from torch import nn

from plait_disagg.models.layers import filled, mlp


class Din(nn.Module):
    """DIN. `rows`: sizes of the item, category and user tables. Item id 0 is padding."""

    def __init__(self, *, rows: tuple[int, int, int], dim: int) -> None:
        super().__init__()
        seed = torch.initial_seed()
        items, categories, users = rows
        self.item_table = nn.Embedding(items, dim, _weight=filled(items, dim, seed=seed))
        self.category_table = nn.Embedding(categories, dim, _weight=filled(categories, dim, seed=seed + 1))
        self.user_table = nn.Embedding(users, dim, _weight=filled(users, dim, seed=seed + 2))
        self.unit = mlp((8 * dim, 80, 40, 1), last=None, between=nn.PReLU)
        self.top = mlp((5 * dim, 200, 80, 1), last=nn.Sigmoid, between=nn.PReLU)

    def forward(
        self,
        user: torch.Tensor,
        history: torch.Tensor,
        history_category: torch.Tensor,
        item: torch.Tensor,
        category: torch.Tensor,
    ) -> torch.Tensor:
        """Return scores (rows,) in 0..1. `history`, `history_category`: (rows, T) int64; the others (rows,)."""
        h = torch.cat([self.item_table(history), self.category_table(history_category)], dim=2)
        v = torch.cat([self.item_table(item), self.category_table(category)], dim=1)
        target = v.unsqueeze(1).expand_as(h)
        a = self.unit(torch.cat([h, target, h - target, h * target], dim=2))
        a = a * (history != 0).unsqueeze(2).to(h.dtype)
        interest = (a * h).sum(dim=1)
        made: torch.Tensor = self.top(torch.cat([interest, v, self.user_table(user)], dim=1))
        return made.squeeze(1)
