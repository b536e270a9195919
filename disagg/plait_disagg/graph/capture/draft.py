"""The program in the making, what capture knows about its values, and where in a traced tensor the rows are.

A program has the rows in front of every tensor. A module may put them elsewhere: `nn.MultiheadAttention` works on
(tokens, rows, features), and a layer over a history on (rows * tokens, features). A `RowsLayout` says how a traced
tensor lies in the program, where only the other dimensions take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from plait_disagg.graph.capture.calls import BagCall, Call, why_unknown
from plait_disagg.graph.edit import Draft, rows_side
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.graph.operators import VOCABULARY, schema_of
from plait_disagg.graph.program import LOOKUP, ROWS, USER_OF, Node, Port, Program, Ref, Rows
from plait_disagg.graph.rows import PER_ROW, Fact, MixesRows, OperatorCall, RowCount
from plait_disagg.tables.values import Mode

_KEEPS_ROWS = frozenset(
    {"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.expand.default"}
)


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


class TracedDraft(Draft):
    """A program in the making. Its values are `Traced`; its constants are the tensors themselves.

    `wanted`: what the traced operator is called, whose calls are added; their names begin with it. `tables`: those of
    its lookups. `keeps_bits`: False once something is computed in another way than by the module.
    """

    def __init__(self, ports: Sequence[Port]) -> None:
        """Create a program that takes `ports` and `USER_OF`."""
        user_of = Port(name=USER_OF, shape=(ROWS,), dtype="int64", rows="item")
        super().__init__(Program(inputs=(*ports, user_of), constants=(), nodes=(), outputs=()), {})
        self._taken = dict.fromkeys((*(port.name for port in ports), USER_OF), 1)
        self._held: dict[int, tuple[torch.Tensor, str]] = {}  # by id: what stands in a trace is known by that
        self.wanted = ""
        self.tables: dict[str, torch.Tensor] = {}
        self.keeps_bits = True

    def hold(self, tensor: torch.Tensor, wanted: str | None = None) -> torch.Tensor:
        """Give a tensor a name, under which it is a constant of the program if a call reads it; return it."""
        self._held.setdefault(id(tensor), (tensor, self._name(wanted or self.wanted)))
        return tensor

    def computed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hold these numbers, laid out as when they are read back."""
        return self.hold(tensor.contiguous())

    def call(self, op: str, layout: RowsLayout, dtype: str, /, **given: Any) -> Traced:
        """Add one call on the program's tensors, checked by the rule of its operator; its result is stored as `layout`
        says. Raises `UnsupportedOperator`."""
        call, operator, shape = Call(op, given), VOCABULARY.get(op), layout.stored
        if operator is None:
            raise UnsupportedOperator(op, why_unknown(op))
        try:
            counts = operator.rule(OperatorCall(tree_map(_as_fact, call.arguments), shape))
        except MixesRows as mixes:
            raise UnsupportedOperator(op, str(mixes)) from mixes
        if (counts is not None) != (shape[:1] == (ROWS,)) or ROWS in shape[1:]:
            raise UnsupportedOperator(op, f"it fixes the number of rows: its result is {shape}")
        traced = traced_in(given)
        anchor = next((value.ref for value in traced if value.fact.counts == PER_ROW), Ref(USER_OF))
        if any(isinstance(value, RowCount) for value in given.values()):  # in a list it is a size
            raise UnsupportedOperator(op, "it uses the number of rows as a number")
        args, kwargs = call.arranged(partial(tree_map, lambda part: self._plain(part, anchor, op)))
        source = given.get("self")
        if op in _KEEPS_ROWS and shape[:1] == (ROWS,) and isinstance(source, Traced) and source.fact.counts:
            args = (args[0], shape, *args[2:])  # ROWS is -1: as many as there are
        rows, name = side_of(traced), self._name(self.wanted)
        self.add(Node(name=name, op=op, args=args, kwargs=kwargs, shape=shape, dtype=dtype, rows=rows))
        return Traced(Ref(name), Fact(shape, counts), rows, dtype, layout)

    def on(self, source: Traced, op: str, dtype: str, shape: tuple[int, ...] | None = None, /, **others: Any) -> Traced:
        """Add a call on `source`, where rows are in front, with the rest of its arguments by name.

        `dtype`, `shape`: of the result; a shape that is left out is the source's.
        """
        layout = source.layout if shape is None else RowsLayout(shape)
        return self.call(op, layout, dtype, **{schema_of(op).arguments[0].name: source}, **others)

    def lookup(
        self, weight: torch.Tensor, mode: Mode, ids: Traced, offsets: Ref | None, weights: Traced | None
    ) -> Traced:
        """Add the lookup of ids in a table that is held. `offsets`: of a bag with its own."""
        table = self._held[id(weight)][1].removesuffix(".weight")
        self.tables[table] = weight
        pooled, width = mode != "rows", weight.shape[1]
        shape = ((ROWS,) if pooled else ids.fact.shape) + (width,)
        name, rows = self._name(table), side_of([ids, weights])
        args = (ids.ref, offsets, None if weights is None else weights.ref)
        kwargs = {"table": table, "mode": mode}
        self.add(Node(name=name, op=LOOKUP, args=args, kwargs=kwargs, shape=shape, rows=rows))
        layout = RowsLayout(shape) if pooled else replace(ids.layout, sizes=(*ids.layout.sizes, width))
        return Traced(Ref(name), Fact(shape, PER_ROW if pooled else ids.fact.counts), rows, "float32", layout)

    def _name(self, wanted: str) -> str:
        """Return `wanted`, with a number appended if the name is taken."""
        self._taken[wanted] = self._taken.get(wanted, 0) + 1
        return wanted if self._taken[wanted] == 1 else self._name(f"{wanted}_{self._taken[wanted]}")

    def _plain(self, value: Any, anchor: Ref, op: str) -> Any:
        """Return a part of an argument as a program holds it. `anchor`: a value with the rows of the call's result."""
        if isinstance(value, Traced):
            return value.ref
        if isinstance(value, RowCount):
            return self.row_count(anchor)
        if isinstance(value, Unknown):
            raise UnsupportedOperator(op, f"it uses a number that depends on the request ({value.text})")
        if isinstance(value, torch.Tensor):
            return self.constant(self._held[id(value)][1], value)
        return value


def add_lookup(call: BagCall, weight: Any, read: Callable[[fx.Node], Any], draft: TracedDraft) -> Traced:
    """Add the lookup in the table `weight`, and what it takes to leave padding out; return its rows.

    `read`: what a node of the trace became. Raises `UnsupportedOperator` if it cannot be served.
    """
    ids = read(call.ids)
    if not isinstance(weight, torch.Tensor) or not isinstance(ids, Traced):
        raise UnsupportedOperator(call.op, "its table is not a parameter of the module")
    call.check_table(weight)
    offsets = _offsets(call, ids, read)
    weights = None if call.weights is None else read(call.weights)
    if weights is not None and (
        not isinstance(weights, Traced) or (weights.fact, weights.layout.is_plain) != (ids.fact, True)
    ):
        how = "have the shape of the ids, and for a bag with offsets be computed from its own ids"
        raise UnsupportedOperator(call.op, f"per_sample_weights must {how}")
    if not call.leaves_out(weight):
        return draft.lookup(weight, call.mode, ids, offsets, weights)
    draft.keeps_bits = False
    counts = draft.on(ids, "aten.ne.Scalar", "bool", other=call.padding_idx)
    left = draft.on(counts, "aten.to.dtype", "float32", dtype=torch.float32)  # 0 for padding, 1 for any other id
    weights = left if weights is None else draft.on(left, "aten.mul.Tensor", "float32", other=weights)
    rows = draft.lookup(weight, "sum", ids, offsets, weights)
    if call.mode == "sum":
        return rows
    count = draft.on(left, "aten.sum.dim_IntList", "float32", (ROWS, 1), dim=(1,), keepdim=True)
    at_least_one = draft.on(count, "aten.clamp_min.default", "float32", min=1)
    return draft.on(rows, "aten.div.Tensor", "float32", other=at_least_one)


def _offsets(call: BagCall, ids: Traced, read: Callable[[fx.Node], Any]) -> Ref | None:
    """Return the bag's own offsets, or None for ids in equal rows or ids that are not pooled."""
    if call.mode == "rows" or call.equal_rows:
        is_plain = call.mode == "rows" or (ids.layout.is_plain and ids.fact.ndim == 2)
        if ids.fact.counts is None or not is_plain:
            raise UnsupportedOperator(call.op, "its ids must have one row per candidate")
        return None
    value = read(call.offsets) if call.offsets is not None else None
    kind, _, bag = (ids.fact.counts or "").partition(":")
    wanted = f"{'offsets' if call.include_last else 'starts'}:{bag}"
    if kind != "ids" or not isinstance(value, Traced) or value.fact.counts != wanted:
        how = "as they are (include_last_offset=True) or without the last (offsets[:-1])"
        raise UnsupportedOperator(call.op, f"a bag must be looked up with its own offsets, {how}")
    return Ref(bag + OFFSETS)


def traced_in(given: Mapping[str, Any]) -> list[Traced]:
    """Return the traced tensors among the arguments of a call."""
    return [value for value in tree_leaves(dict(given)) if isinstance(value, Traced)]


def _as_fact(value: Any) -> Any:
    """Return a part of an argument as the rules see it."""
    if isinstance(value, Traced):
        return value.fact
    return Fact(tuple(value.shape)) if isinstance(value, torch.Tensor) else value


def side_of(values: Iterable[Any]) -> Rows:
    """Return whose rows a result of these has."""
    return rows_side({value.rows for value in values if isinstance(value, Traced)})


def dtype_of(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype by its name in torch."""
    return str(tensor.dtype).removeprefix("torch.")
