"""Small modules that the graph tests capture: each has a construct that real models have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from plait_disagg.graph.inputs import Bag, Dense, Ids, Input


class Small(nn.Module):
    """Bags and an id on both sides, a bottom MLP, dot products, a top MLP."""

    inputs: tuple[Input, ...] = (
        Dense("age", "user", (3,)),
        Bag("history", "user"),
        Ids("country", "user"),
        Bag("tags", "item"),
        Ids("item", "item"),
        Dense("price", "item", (2,)),
    )

    def __init__(self) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(50, 8, mode="sum", include_last_offset=True)
        self.tags = nn.EmbeddingBag(30, 8, mode="mean", include_last_offset=True)
        self.country = nn.Embedding(7, 8)
        self.item = nn.Embedding(40, 8)
        self.bottom = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 10 + 2, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))

    def forward(self, *, age, history, history_offsets, country, tags, tags_offsets, item, price):
        x = self.bottom(age)
        z = torch.stack(
            [
                x,
                self.history(history, history_offsets),
                self.country(country),
                self.tags(tags, tags_offsets),
                self.item(item),
            ],
            dim=1,
        )
        products = torch.bmm(z, z.transpose(1, 2)).flatten(1)
        lower = torch.tril_indices(5, 5, -1)
        pairs = products[:, lower[0] * 5 + lower[1]]
        return torch.sigmoid(self.top(torch.cat([x, pairs, price], dim=1))).squeeze(1)


class Zoo(nn.Module):
    """Everything at once: hashed ids, lengths of bags, padding, positions, attention, norms, several outputs."""

    inputs: tuple[Input, ...] = (
        Bag("clicks", "user"),
        Ids("steps", "user", (5,)),
        Ids("kinds", "item", (3,)),
        Dense("x", "item", (4,)),
    )

    def __init__(self) -> None:
        super().__init__()
        self.clicks = nn.EmbeddingBag(20, 8, mode="max")
        self.kinds = nn.EmbeddingBag(12, 8, mode="sum")
        self.steps = nn.Embedding(30, 8, padding_idx=0)
        self.place = nn.Embedding(5, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.norm = nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, *, clicks, clicks_offsets, steps, kinds, x):
        pooled = self.clicks(clicks % 20, clicks_offsets[:-1])
        count = (clicks_offsets[1:] - clicks_offsets[:-1]).to(torch.float32).unsqueeze(1)
        tokens = self.steps(steps) + self.place(torch.arange(5)).unsqueeze(0)
        query = self.token.expand(steps.shape[0], -1, -1) + pooled.unsqueeze(1)
        seen = (steps != 0).unsqueeze(1)
        attended = F.scaled_dot_product_attention(query, tokens, tokens, attn_mask=seen | ~seen).squeeze(1)
        user = self.norm(attended) / (1 + count)
        left, right = self.batch_norm(self.kinds(kinds)).chunk(2, dim=1)
        zeros = torch.zeros(x.shape[0], 4)
        item = torch.cat([left * right + x, zeros], dim=1)
        both = self.drop(user * item)
        best = both.max(dim=1)[0]
        parts = self.out(both).unbind(1)
        return {"score": torch.einsum("bd,bd->b", user, item) + best, "parts": torch.stack(parts[:2], dim=1)}


class Weighted(nn.Module):
    """A bag whose rows are weighted by something computed from its own ids; a user-side layer; normalised products."""

    inputs: tuple[Input, ...] = (
        Bag("seen", "user"),
        Bag("tags", "item"),
        Ids("item", "item"),
        Dense("x", "user", (3,)),
    )

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(25, 8)
        self.item = nn.Embedding(9, 8)
        self.weigh = nn.Linear(8, 1)
        self.mix = nn.Linear(8 + 8 + 3, 8)

    def pooled(self, ids, offsets):
        weights = torch.sigmoid(self.weigh(self.rows(ids))).squeeze(1)
        return F.embedding_bag(
            ids, self.rows.weight, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )

    def forward(self, *, seen, seen_offsets, tags, tags_offsets, item, x):
        user, liked = self.pooled(seen, seen_offsets), self.pooled(tags, tags_offsets)
        mixed = self.mix(torch.cat([user, liked, x], dim=1))
        return F.cosine_similarity(mixed, self.item(item), dim=1), F.softplus(mixed).mean(dim=1)
