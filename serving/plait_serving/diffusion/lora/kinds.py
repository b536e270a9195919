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
class FileMatrix:
    """A matrix as a file has it: `left (o, r) @ right (r, ...)`, or `right` alone, or, with a Tucker `core
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

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two matrices in float32 whose product it is; one of them the identity if it is no product."""
        if self.left is not None and self.core is None:
            return self.left.float(), self.right.float().flatten(1)
        whole, one = self.made(torch.empty(0)), torch.eye(self.rank)
        return (whole, one) if whole.shape[1] == self.rank else (one, whole)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factor:
    """One module's share of a file: of a LoRA, or of a difference that is added as it is, the `first` matrix; of a LoHa
    two multiplied number by number; of a LoKr their Kronecker product. The numbers are finite, in the file's dtype, on
    the CPU.

    `rank`: what alpha is divided by. `rows`: those of the product that it is, none means all: where a layer of the file
    is several here, one cannot cut its matrices wherever one likes.
    """

    first: FileMatrix
    second: FileMatrix | None = None
    is_kronecker: bool = False
    alpha: float
    rank: int
    bound: float
    magnitude: torch.Tensor | None = None
    by_input: bool = False
    rows: Rows = ()

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Up `(o, r)` and down `(r, D)`, if it is nothing but a LoRA."""
        if self.first.left is None or self.second is not None or self.magnitude is not None:
            return None
        return self.first.left, self.first.right.flatten(1)

    @property
    def row_rank(self) -> int | None:
        """The rank that it has as an input of a step; None: it cannot be one, as a DoRA changes every number.

        Of two matrices it is the product of theirs: `(A B) * (C D)` has a column for each pair of theirs, and so has
        their Kronecker product, by the mixed-product rule. Only a LoRA has one beyond `MAX_ROW_RANK`.
        """
        rank = self.first.rank * (1 if self.second is None else self.second.rank)
        is_small = rank <= MAX_ROW_RANK and self.magnitude is None
        return rank if is_small or self.plain else None

    @property
    def shape(self) -> tuple[int, int]:
        """(o, D)."""
        height, width = self.first.shape
        if self.second is not None and self.is_kronecker:
            height, width = height * self.second.shape[0], width * self.second.shape[1]
        return sum(end - start for start, end in self.rows) if self.rows else height, width

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return down `(r, D)` and up `(o, r)` in float32 whose product it is."""
        up, down = self.first.pair()
        if self.second is not None:
            c, d = self.second.pair()
            if self.is_kronecker:
                up, down = torch.kron(up, c), torch.kron(down, d)
            else:
                up = (up[:, :, None] * c[:, None, :]).flatten(1)
                down = (down[:, None, :] * d[None, :, :]).flatten(0, 1)
        return down, _section(up, self.rows)

    def product(self, like: torch.Tensor) -> torch.Tensor:
        """Return the product `(o, D)` with the dtype and on the device of `like`: a kernel is the last part of the
        second matrix's columns, as of the weight's."""
        made = self.first.made(like)
        if self.second is not None:
            second = self.second.made(like)
            made = torch.kron(made, second.contiguous()) if self.is_kronecker else made * second
        return _section(made, self.rows)


def section(factor: Factor, rows: Rows) -> Factor:
    """Return what a factor adds to these rows of its weight. Raises `LoraError` for a DoRA whose norms span all rows.

    Of a LoRA it has the ranks that these rows use: what a trainer split is one layer in its file, where each part has
    ranks of its own.
    """
    if factor.by_input:
        raise LoraError("a DoRA with a norm for each input, of a layer that is several here, is not read")
    magnitude = None if factor.magnitude is None else _section(factor.magnitude, rows)
    if factor.second is not None or factor.first.left is None:
        return replace(factor, rows=rows, magnitude=magnitude)
    up, down = _section(factor.first.left, rows), factor.first.right
    used = up.any(dim=0)
    if used.any() and not used.all():
        up, down = up[:, used], down[used]
    alpha = factor.alpha * len(down) / factor.rank
    return replace(factor, first=FileMatrix(left=up, right=down), rank=len(down), alpha=alpha, magnitude=magnitude)


def _section(matrix: torch.Tensor, rows: Rows) -> torch.Tensor:
    if len(rows) > 1:
        return torch.cat([matrix[start:end] for start, end in rows])
    return matrix[slice(*rows[0])] if rows else matrix


def merged_in_turn(pristine: torch.Tensor, factors: Sequence[tuple[Factor, float]]) -> torch.Tensor:
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
