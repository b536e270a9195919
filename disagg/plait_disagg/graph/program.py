"""A program: the operators of a model, or of one of its halves, as plain values.

Capture makes it, the cutters partition it, a package stores it as JSON and a worker runs it. Nothing in it can run
code outside the operator vocabulary (`operators.py`), so a package may come from anywhere. (PyTorch's own archive of
an exported program falls back to a full unpickle for what it cannot read otherwise, which is why we do not store
that.)

Every operator is one ATen overload, called as the eager module would call it, so that a program reproduces the
module bit for bit. Two operators are ours:

`plait.lookup(ids, offsets, weights, table=, mode=)`  rows of a table, pooled over bags (sum, mean, max) or not
(rows) `plait.tile(x, user_of, copy=)`                       a user-side tensor, a row per user, to a row per
candidate

`copy=True` (exact programs): never a view. `USER_OF` is the last input of every program; before `tile` it only
counts the rows.

Rows: a tensor's first dimension is `rows` (of users or of candidates) unless it is a constant or flat ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

LOOKUP = "plait.lookup"
TILE = "plait.tile"

USER_OF = "user_of"
"""The input of a tiled program that maps each candidate to its user row: (candidates,) int64, ascending."""

ROWS = -1
"""A dimension in `Port.shape` that equals the number of rows (or, for flat ids, the number of ids)."""

Rows = Literal["none", "user", "item"]
"""What a tensor's rows stand for: none (a constant), one per user, or one per candidate."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the value of that name: an input, a constant or a node."""

    name: str


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype as an argument, by its name in torch (`float32`)."""

    name: str


Arg: TypeAlias = "Ref | DType | int | float | bool | str | tuple[Arg, ...] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A tensor that a program takes: shape with `ROWS` where it varies, dtype by its name in torch, and whose rows it
    has."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator. `op` names it (`aten.linear.default`, `plait.tile`); `shape` and `dtype` describe its result.

    A node that makes a number (`aten.sym_size.int` and arithmetic on it) has an empty shape and the dtype `int`.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    rows: Rows = "none"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads, in order, each once."""
        found: dict[str, None] = {}
        _collect(self.args, found)
        _collect(tuple(self.kwargs.values()), found)
        return tuple(found)

    @property
    def parts(self) -> tuple[Ref, ...]:
        """The values of its first argument, in order: what a cat joins, or the one that any other operator works on."""
        first = self.args[0] if self.args else ()
        return tuple(part for part in (first if isinstance(first, tuple) else (first,)) if isinstance(part, Ref))


@dataclass(frozen=True, kw_only=True)
class Program:
    """Nodes in an order in which they can run. `outputs`: (public name, value) pairs."""

    inputs: tuple[Port, ...]
    constants: tuple[Port, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, Ref], ...]

    @cached_property
    def values(self) -> Mapping[str, Port | Node]:
        """Everything that a reference may name: inputs, constants and nodes, in this order."""
        values: list[Port | Node] = [*self.inputs, *self.constants, *self.nodes]
        return {value.name: value for value in values}


def _collect(arguments: tuple[Arg, ...], found: dict[str, None]) -> None:
    for argument in arguments:
        if isinstance(argument, Ref):
            found[argument.name] = None
        elif isinstance(argument, tuple):
            _collect(argument, found)
