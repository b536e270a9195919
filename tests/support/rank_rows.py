"""Models whose rows cross as they are, packaged, and what a test needs to serve their halves."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from plait_disagg.graph.inputs import Ids, Input
from plait_disagg.messages.check import check_request
from plait_disagg.models.configs import random_request
from plait_disagg.package.read import Package, open_package
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.tables.values import OutOfRange
from plait_disagg.values import RankRequest

ITEMS, KINDS, DIM = 300, 20, 16

INPUTS: tuple[Input, ...] = (Ids("liked", "user", (6,)), Ids("item", "item"), Ids("kind", "item"))


class DotProductScorer(nn.Module):
    """Scores an item by its dot products with the items that the user liked; nothing but rows crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM)
        self.kinds = nn.Embedding(KINDS, DIM)
        self.top = nn.Linear(6, 1)

    def forward(self, liked: torch.Tensor, item: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        v = self.items(item) + self.kinds(kind)
        products = torch.bmm(self.items(liked), v.unsqueeze(2)).squeeze(2)
        made: torch.Tensor = self.top(products)
        return made.squeeze(1)


def packaged(folder: Path, *, out_of_range: OutOfRange = "error") -> Package:
    """`DotProductScorer` in ``folder``, cut by colouring, which leaves no sum on the CN."""
    torch.manual_seed(5)
    options = PackageOptions(cutter="prism", out_of_range=out_of_range)
    write_package(folder, DotProductScorer().eval(), INPUTS, name="match", options=options)
    return open_package(folder)


def request(package: Package, seed: int = 0, candidates: int = 7, *, alpha: float = 1.2) -> RankRequest:
    """A request with Zipf ids; the same seed gives the same one."""
    manifest = package.manifest
    made = random_request(
        manifest.inputs,
        manifest.bounds,
        model=manifest.name,
        candidates=candidates,
        ids_per_bag={},
        alpha=alpha,
        seed=seed,
    )
    return check_request(package.card(), made.tensors, request_id=f"r{seed}")
