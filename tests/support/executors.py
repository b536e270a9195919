"""A small module with every kind of layer that executors treat apart, and the plainest way to compute it with LoRAs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from plait_kernels.executors import Computation, InputSpec, RowFactors
from plait_kernels.executors.openvino_executor import OpenVinoExecutor, OpenVinoSettings
from plait_kernels.executors.store import ProgramStore

CHANNELS, WIDTH, COND = 6, 40, 12
LAYERS = {
    "conv_in": (CHANNELS * 9, WIDTH), "condition": (COND, WIDTH), "point": (WIDTH, WIDTH), "tokens.0": (WIDTH, WIDTH),
    "tokens.2": (WIDTH, WIDTH), "down": (WIDTH * 9, WIDTH), "conv_out": (WIDTH * 9, 3),
}  # fmt: skip
"""What takes factors, with its widths: linear layers on rows and on tokens; convolutions, one of them with strides."""


class SmallBlock(nn.Module):
    """`x (R, 6, h, w)` and `condition (R, 12)` to two images of the same size and one of half the size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.condition = nn.Linear(COND, WIDTH)
        self.norm = nn.GroupNorm(8, WIDTH)
        self.point = nn.Conv2d(WIDTH, WIDTH, 1)
        self.tokens = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
        self.grouped = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=4)
        self.down = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.conv_out = nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute them."""
        x = self.conv_in(x) + self.condition(condition)[:, :, None, None]
        x = x + self.point(F.silu(self.norm(x)))
        tokens = self.tokens(x.flatten(2).transpose(1, 2))
        x = x + tokens.transpose(1, 2).reshape(x.shape)
        x = x + self.grouped(x)
        return self.conv_out(x), x, self.down(x)


def small_block(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> SmallBlock:
    """A seeded one; its parameters in `dtype`."""
    with torch.random.fork_rng(devices=[]):  # not `support.tiny`, whose diffusers takes processes of tests seconds
        torch.manual_seed(seed)
        return SmallBlock().to(dtype).eval().requires_grad_(requires_grad=False)


def small_inputs(rows: int, height: int, width: int, *, seed: int = 1) -> list[torch.Tensor]:
    """Seeded inputs."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, CHANNELS, height, width, generator=rng), torch.randn(rows, COND, generator=rng)]


def small_computation(block: nn.Module, *, takes_factors: bool = True) -> Computation:
    """It as a computation whose rows and sides vary."""
    return Computation(
        module=block,
        inputs=(
            InputSpec(name="x", shape=(None, CHANNELS, None, None)),
            InputSpec(name="condition", shape=(None, COND)),
        ),
        example=tuple(small_inputs(2, 4, 6, seed=2)),
        takes_factors=takes_factors,
    )


def small_factors(ranks: Sequence[Mapping[str, int]], *, seed: int = 3) -> RowFactors:
    """Factors of rows, each with its own rank in each layer (none where it is not named), padded to the highest."""
    rng = torch.Generator().manual_seed(seed)
    by_path = {}
    for path, (inputs, outputs) in LAYERS.items():
        highest = max(row.get(path, 0) for row in ranks)
        if not highest:
            continue
        first, second = torch.zeros(len(ranks), inputs, highest), torch.zeros(len(ranks), highest, outputs)
        for k, row in enumerate(ranks):
            rank = row.get(path, 0)
            first[k, :, :rank] = torch.randn(inputs, rank, generator=rng) / inputs**0.5
            second[k, :rank] = torch.randn(rank, outputs, generator=rng) * 0.7
        by_path[path] = first, second
    return RowFactors(rows=len(ranks), by_path=by_path)


@torch.no_grad()
def by_hand(
    block: SmallBlock, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None
) -> tuple[torch.Tensor, ...]:
    """The definition, in float64: row by row, with the row's factors merged into a copy of the weights."""
    rows = []
    for k in range(len(inputs[0])):
        one = copy.deepcopy(block).double()
        for path, (first, second) in (factors.by_path if factors is not None else {}).items():
            weight = one.get_submodule(path).weight
            row = k if len(first) > 1 else 0  # one row of factors is every row's
            weight += (first[row].double() @ second[row].double()).T.reshape(weight.shape)
        rows.append(one(*(value[k : k + 1].double() for value in inputs)))
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def openvino_at(folder: Path, **settings: Any) -> OpenVinoExecutor:
    """An executor on one thread over a store of its own."""
    return OpenVinoExecutor(ProgramStore(folder), OpenVinoSettings(**{"threads": lambda: 1, **settings}))
