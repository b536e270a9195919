"""A recommendation model as a user would write it: what `plait models package` is tried on."""

from __future__ import annotations

import torch
from torch import nn

from plait_disagg.graph.inputs import Bag, Dense, Ids
from plait_disagg.package.items import Items

PRODUCTS = 30


class Shop(nn.Module):
    """A customer, their age and what they looked at, against a product and its price."""

    def __init__(self):
        super().__init__()
        self.customers = nn.Embedding(40, 8)
        self.products = nn.Embedding(PRODUCTS, 8)
        self.seen = nn.EmbeddingBag(PRODUCTS, 8, mode="mean", include_last_offset=True)
        self.top = nn.Sequential(nn.Linear(26, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, customer, age, seen, seen_offsets, product, price):
        user = torch.cat([self.customers(customer), self.seen(seen, seen_offsets), age], 1)
        return torch.sigmoid(self.top(torch.cat([user, self.products(product), price], 1)))[:, 0]


class Spectral(nn.Module):
    """Holds an operator that cannot be cut."""

    def forward(self, x):
        return torch.fft.fft(x).real[:, 0]


INPUTS = (
    Ids("customer", side="user"),
    Dense("age", side="user"),
    Bag("seen", side="user"),
    Ids("product"),
    Dense("price"),
)


def make():
    """(module, inputs, items)."""
    torch.manual_seed(0)
    features = {"product": torch.arange(PRODUCTS), "price": torch.rand(PRODUCTS, 1)}
    return Shop(), INPUTS, Items(features=features, names=[f"product {i}" for i in range(PRODUCTS)])


def make_without_items():
    """(module, inputs)."""
    return make()[:2]


def refused():
    """A model that is refused."""
    return Spectral(), [Dense("x", shape=(4,))]


def only_the_module():
    """Not what is asked for."""
    return Shop()


def no_module():
    """Not what is asked for either."""
    return "shop", INPUTS


def no_inputs():
    """Nor this."""
    return Shop(), ["customer"]


def no_items():
    """Nor this."""
    return Shop(), INPUTS, {"product": [1]}


NOT_A_FUNCTION = 3
