"""Models of a user's history, to which candidates attend: DIN and HSTU.

Item id 0 is padding: histories of any length up to T.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from plait_disagg.models.layers import filled, mlp


class Din(nn.Module):
    """DIN (Zhou et al., 2018, arXiv 1706.06978): the target item attends to the user's history.

        h_t = item embedding + category embedding of step t     (rows, T, 2 d)   user-side: crosses once a request
        v   = the same of the candidate                         (rows, 2 d)
        a_t = unit([h_t, v, h_t - v, h_t * v])                  not normalised, 0 where the history is padding (id 0)
        score = sigmoid(top([sum_t a_t h_t, v, user embedding]))

    The dense half is heavy: the unit runs for every candidate and every step. `rows`: sizes of the item, category and
    user tables.
    """

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


class _Layer(nn.Module):
    """One layer, of `heads` heads, over the history and over a candidate."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.norm_attended = nn.LayerNorm(width)
        self.uvqk = nn.Linear(width, 4 * width)
        self.out = nn.Linear(width, width)

    def history(self, x: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the steps (rows, T, W) after the layer, and their keys and values. `seen` (rows, 1, T, T): 1 where a
        step attends to another, divided by T + 1."""
        u, v, q, k = self._split(x)
        a = nn.functional.silu(q @ k.transpose(2, 3) * self._scale(q)) * seen
        attended = (a @ v).transpose(1, 2).flatten(2)
        return x + self.out(self.norm_attended(attended) * u), k, v

    def candidate(self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_step: torch.Tensor) -> torch.Tensor:
        """Return the candidate (rows, W) after the layer. `is_step` (rows, 1, 1, T): 1 for a step, divided by
        T + 1."""
        u, own_v, q, own_k = self._split(x.unsqueeze(1))
        a = nn.functional.silu(q @ k.transpose(2, 3) * self._scale(q)) * is_step
        own = nn.functional.silu((q * own_k).sum(3, keepdim=True) * self._scale(q)) / (k.shape[2] + 1)
        attended = (a @ v + own * own_v).transpose(1, 2).flatten(1)
        added: torch.Tensor = self.out(self.norm_attended(attended) * u.squeeze(1))
        return x + added

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return u (rows, T, W), and v, q, k by head (rows, heads, T, W / heads)."""
        u, v, q, k = nn.functional.silu(self.uvqk(self.norm(x))).chunk(4, dim=2)
        return u, self._by_head(v), self._by_head(q), self._by_head(k)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = x.unflatten(2, (self.heads, x.shape[2] // self.heads))  # type: ignore[no-untyped-call]
        return heads.transpose(1, 2)

    def _scale(self, q: torch.Tensor) -> float:
        return 1.0 / math.sqrt(q.shape[3])


class Hstu(nn.Module):
    """HSTU (Zhai et al., 2024, arXiv 2402.17152) as it ranks: a history, and candidates that attend to it.

        x      = [item embedding, category embedding] of a step of the history, or of a candidate     (.., 2 d)
        u, v, q, k = silu(W norm(x))
        a      = silu(q k^T / sqrt(d_h)) / (T + 1)     pointwise, not a softmax
        x'     = x + W'(norm(a v) * u)
        score  = sigmoid(top(x of the candidate after all layers))

    A step attends to itself and earlier ones, a candidate to all steps and to itself, never to another candidate. The
    history's layers are the user's and run once a request. `rows`: sizes of the item and category tables; each is
    `dim` wide.
    """

    def __init__(self, *, rows: tuple[int, int], dim: int, layers: int, heads: int) -> None:
        super().__init__()
        seed = torch.initial_seed()
        items, categories = rows
        self.item_table = nn.Embedding(items, dim, _weight=filled(items, dim, seed=seed))
        self.category_table = nn.Embedding(categories, dim, _weight=filled(categories, dim, seed=seed + 1))
        self.layers = nn.ModuleList(_Layer(2 * dim, heads) for _ in range(layers))
        self.top = mlp((2 * dim, dim, 1), last=nn.Sigmoid)

    def forward(
        self, history: torch.Tensor, history_category: torch.Tensor, item: torch.Tensor, category: torch.Tensor
    ) -> torch.Tensor:
        """Return scores (rows,) in 0..1. `history`, `history_category`: (rows, T) int64; the others (rows,)."""
        steps = torch.cat([self.item_table(history), self.category_table(history_category)], dim=2)
        x = torch.cat([self.item_table(item), self.category_table(category)], dim=1)
        length = history.shape[1]
        is_step = (history != 0).to(steps.dtype).unsqueeze(1).unsqueeze(1) / (length + 1)
        seen = is_step * torch.ones(length, length).tril()
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            steps, k, v = layer.history(steps, seen)
            x = layer.candidate(x, k, v, is_step)
        made: torch.Tensor = self.top(x)
        return made.squeeze(1)
