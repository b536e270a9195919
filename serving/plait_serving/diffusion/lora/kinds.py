"""What a file adds to one weight: LoRA, LoHa, LoKr, and DoRA around any of them.

Symbols: a module's weight is `(o, i)` or `(o, i, kh, kw)`, here always flattened to `(o, D)`, D = i * kh * kw. Every
kind adds c times its product, c = scale * alpha / rank. A `bound` is at least every number of the product, so whether a
merge can overflow is known without doing it.

A DoRA has a `magnitude`, the norms that the weight's rows have in the end: o numbers; or i, if `by_input`: the norms of
the input channels (LyCORIS without `wd_on_output`). Its bound is infinite: a norm may be as small as can be.

Formulas: LoHa is FedPara (arXiv 2108.06098), LoKr is LyCORIS (arXiv 2309.14859), DoRA is arXiv 2402.09353; where they
leave something open, PEFT decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from plait_serving.diffusion.errors import LoraError

MAX_ROW_RANK = 64
"""A LoHa or LoKr is an input of a step only up to this rank; beyond, its factors compute as much as the layer."""


Rows: TypeAlias = tuple[tuple[int, int], ...]
"""Rows of a weight, one range below the other: each from its first to before its second number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factor:
    """One module's share of a LoRA: `up @ down`. `down (r, D)` and `up (o, r)` in the file's dtype, finite, on the CPU.

    Its `bound` is of rows of up times columns of down (Cauchy-Schwarz).
    """

    down: torch.Tensor
    up: torch.Tensor
    alpha: float
    bound: float
    magnitude: torch.Tensor | None = None
    by_input: bool = False

    @property
    def rank(self) -> int:
        """The rank r."""
        return self.down.shape[0]

    @property
    def row_rank(self) -> int | None:
        """The rank that it has as an input of a step; None: it cannot be one, as a DoRA changes every number."""
        return self.rank if self.magnitude is None else None

    @property
    def shape(self) -> tuple[int, int]:
        """(o, D)."""
        return self.up.shape[0], self.down.shape[1]

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return down and up whose product it is."""
        return self.down, self.up

    def product(self, like: torch.Tensor) -> torch.Tensor:
        """Return the product `(o, D)` with the dtype and on the device of `like`."""
        return self.up.to(like) @ self.down.to(like)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileMatrix:
    """A matrix as a LoHa or LoKr file has it: `left (o, r) @ right (r, ...)`, or `right` alone, or, with a Tucker `core
    (r, s, kh, kw)`, of `left (r, o)` and `right (s, i)`."""

    right: torch.Tensor
    left: torch.Tensor | None = None
    core: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of what it makes, flattened to two dimensions."""
        if self.left is None:
            return self.right.shape[0], math.prod(self.right.shape[1:])
        if self.core is None:
            return self.left.shape[0], math.prod(self.right.shape[1:])
        return self.left.shape[1], self.right.shape[1] * math.prod(self.core.shape[2:])

    @property
    def rank(self) -> int:
        """The columns of `pair`'s first matrix."""
        return min(self.shape) if self.left is None or self.core is not None else self.left.shape[1]

    def made(self, like: torch.Tensor) -> torch.Tensor:
        """Return it as one matrix with the dtype and on the device of `like`."""
        right = self.right.to(like)
        if self.left is None:
            return right.flatten(1)
        if self.core is None:
            return self.left.to(like) @ right.flatten(1)
        return torch.einsum("abhw,bi,ao->oihw", self.core.to(like), right, self.left.to(like)).flatten(1)

    def pair(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two matrices whose product it is; one of them the identity if it is no product."""
        if self.left is not None and self.core is None:
            return self.left.to(like), self.right.to(like).flatten(1)
        whole = self.made(like)
        one = torch.eye(self.rank).to(like)
        return (whole, one) if whole.shape[1] == self.rank else (one, whole)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairFactor:
    """One module's share whose product is made of two matrices: of a LoHa multiplied number by number, of a LoKr their
    Kronecker product. `rank`: what alpha is divided by. `rows`: those of the product that it is, none means all: where
    a layer of the file is several here, one cannot cut its matrices wherever one likes."""

    first: FileMatrix
    second: FileMatrix
    is_kronecker: bool
    alpha: float
    rank: int
    bound: float
    magnitude: torch.Tensor | None = None
    by_input: bool = False
    rows: Rows = ()

    @property
    def row_rank(self) -> int | None:
        """The product of the matrices' ranks: `(A B) * (C D)` has a column for each pair of theirs, and so has their
        Kronecker product, by the mixed-product rule. None beyond `MAX_ROW_RANK`, and of a DoRA."""
        rank = self.first.rank * self.second.rank
        return rank if rank <= MAX_ROW_RANK and self.magnitude is None else None

    @property
    def shape(self) -> tuple[int, int]:
        """(o, D)."""
        (a, b), (c, d) = self.first.shape, self.second.shape
        height, width = (a * c, b * d) if self.is_kronecker else (a, b)
        return sum(end - start for start, end in self.rows) if self.rows else height, width

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return down `(r, D)` and up `(o, r)` in float32 whose product it is."""
        (a, b), (c, d) = self.first.pair(_SINGLE), self.second.pair(_SINGLE)
        if self.is_kronecker:
            return torch.kron(b, d), _section(torch.kron(a, c), self.rows)
        up = (a[:, :, None] * c[:, None, :]).flatten(1)
        return (b[:, None, :] * d[None, :, :]).flatten(0, 1), _section(up, self.rows)

    def product(self, like: torch.Tensor) -> torch.Tensor:
        """Return the product `(o, D)`: a kernel is the last part of the second matrix's columns, as of the weight's."""
        first, second = self.first.made(like), self.second.made(like)
        return _section(torch.kron(first, second.contiguous()) if self.is_kronecker else first * second, self.rows)


AnyFactor: TypeAlias = Factor | PairFactor


def section(factor: AnyFactor, rows: Rows) -> AnyFactor:
    """Return what a factor adds to these rows of its weight. Raises `LoraError` for a DoRA whose norms span all rows.

    Of a LoRA it has the ranks that these rows use: what a trainer split is one layer in its file, where each part has
    ranks of its own.
    """
    if factor.by_input:
        raise LoraError("a DoRA with a norm for each input, of a layer that is several here, is not read")
    magnitude = None if factor.magnitude is None else _section(factor.magnitude, rows)
    if isinstance(factor, PairFactor):
        return replace(factor, rows=rows, magnitude=magnitude)
    up, down = _section(factor.up, rows), factor.down
    used = up.any(dim=0)
    if used.any() and not used.all():
        up, down = up[:, used], down[used]
    return replace(factor, up=up, down=down, alpha=factor.alpha * len(down) / factor.rank, magnitude=magnitude)


def _section(matrix: torch.Tensor, rows: Rows) -> torch.Tensor:
    if len(rows) > 1:
        return torch.cat([matrix[start:end] for start, end in rows])
    return matrix[slice(*rows[0])] if rows else matrix


_SINGLE = torch.empty(0)


def merged_in_turn(pristine: torch.Tensor, factors: Sequence[tuple[AnyFactor, float]]) -> torch.Tensor:
    """Return a weight with factors of any kinds and their c, one after the other; a new tensor like `pristine`. It may
    hold NaN or infinity."""
    wide = torch.promote_types(pristine.dtype, torch.float32)
    bare = pristine.flatten(1).to(wide)
    total = bare
    for factor, c in factors:
        delta = c * factor.product(bare)
        total = total + delta
        if factor.magnitude is not None:
            total = _normed(total, bare + delta, factor.magnitude.to(bare), by_input=factor.by_input)
    return total.to(pristine.dtype, copy=True).view(pristine.shape)


def _normed(total: torch.Tensor, alone: torch.Tensor, magnitude: torch.Tensor, *, by_input: bool) -> torch.Tensor:
    """Return `magnitude / norm(alone) * total`, as PEFT does: the norm does not see what other LoRAs have added."""
    if not by_input:
        return (magnitude / alone.square().sum(dim=1).sqrt())[:, None] * total
    channels = (len(alone), len(magnitude), -1)
    norms = alone.view(channels).square().sum(dim=(0, 2)).sqrt()
    return ((magnitude / norms)[:, None] * total.view(channels)).flatten(1)
