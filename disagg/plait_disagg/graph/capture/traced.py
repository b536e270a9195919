"""What capture knows about the values of a trace, and where in a traced tensor the rows are.

A program has the rows in front of every tensor. A module may put them elsewhere: `nn.MultiheadAttention` works on
(tokens, rows, features), and a layer over a history on (rows * tokens, features). A `RowsLayout` says how a traced
tensor lies in the program, where only the other dimensions take part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from plait_disagg.graph.program import ROWS, Ref, Rows
from plait_disagg.graph.rows import Fact, MixesRows, RowCount


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """A traced shape: `sizes`, with `ROWS` at dimension `at`, which holds `before` * rows * `after` numbers.

    The rows of dimension `at` vary slower than its `after` and faster than its `before`. The program's tensor is
    (rows, sizes before `at`, before, after, sizes behind `at`), without `before` and `after` where they are 1.
    """

    sizes: tuple[int, ...]
    at: int = 0
    before: int = 1
    after: int = 1

    @property
    def is_plain(self) -> bool:
        """Return whether the traced tensor and the program's are the same."""
        return (self.at, self.before, self.after) == (0, 1, 1)

    @property
    def inner(self) -> tuple[int, ...]:
        """The parts of dimension `at` other than the rows."""
        return tuple(size for size in (self.before, self.after) if size != 1)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the program's tensor."""
        if self.is_plain:
            return self.sizes
        return (ROWS, *self.sizes[: self.at], *self.inner, *self.sizes[self.at + 1 :])

    @property
    def ndim(self) -> int:
        """Number of traced dimensions."""
        return len(self.sizes)

    def place(self, dim: int, ndim: int | None = None) -> int:
        """Return the program's dimension for a traced one. Raises `MixesRows` for that of the rows."""
        dim %= ndim or self.ndim
        if dim == self.at:
            raise MixesRows(f"it works along the rows (dim {dim})")
        return dim + 1 if dim < self.at else dim + len(self.inner)

    def reshaped(self, sizes: tuple[int, ...], at: int, factor: int) -> RowsLayout:
        """Return the layout after a reshape to `sizes`, where dimension `at` has `factor` numbers for each row."""
        left, right = prod(self.sizes[: self.at]) * self.before, prod(self.sizes[self.at + 1 :]) * self.after
        outer, behind = prod(sizes[:at]), prod(sizes[at + 1 :])
        if not outer or not behind or left % outer or right % behind or (left // outer) * (right // behind) != factor:
            raise MixesRows("it cuts rows into pieces that do not fit")
        return RowsLayout(sizes, at, left // outer, right // behind)


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced tensor: the program's value, what is known about that, whose rows it has, its dtype and its layout."""

    ref: Ref
    fact: Fact
    rows: Rows
    dtype: str
    layout: RowsLayout


@dataclass(frozen=True, slots=True)
class Unknown:
    """A number that depends on the request other than through its number of rows."""

    text: str


def leaves(arguments: Any) -> list[Any]:
    """Return the arguments, with tuples and lists replaced by what they hold."""
    values = arguments.values() if isinstance(arguments, Mapping) else arguments
    found: list[Any] = []
    for value in values:
        found += leaves(value) if isinstance(value, tuple | list) else [value]
    return found


def varies(arguments: Mapping[str, Any]) -> bool:
    """Return whether the result depends on the request, in its values or only in its size."""
    return any(isinstance(value, Traced | RowCount) for value in leaves(arguments))


def as_fact(value: Any) -> Any:
    """Return an argument as the rules see it."""
    if isinstance(value, Traced):
        return value.fact
    if isinstance(value, torch.Tensor):
        return Fact(tuple(value.shape))
    if isinstance(value, tuple | list):
        return tuple(as_fact(part) for part in value)
    return value


def side_of(arguments: Mapping[str, Any]) -> Rows:
    """Return whose rows a result has."""
    sides = {value.rows for value in leaves(arguments) if isinstance(value, Traced)} - {"none"}
    return "item" if "item" in sides else "user" if sides else "none"


def dtype_of(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype by its name in torch."""
    return str(tensor.dtype).removeprefix("torch.")
