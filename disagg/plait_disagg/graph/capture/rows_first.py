"""Operators on values whose rows are not by themselves in front, rewritten for the program, where they are.

Each rewrite makes the same numbers in another order of dimensions. What would mix rows has no rewrite, and what is
made here is checked by the same rules (`rows.py`) as any other call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from plait_disagg.graph.capture.calls import Call
from plait_disagg.graph.capture.draft import RowsLayout, Traced, TracedDraft, traced_in
from plait_disagg.graph.operators import RESHAPES, VOCABULARY, schema_of
from plait_disagg.graph.program import ROWS
from plait_disagg.graph.rows import MixesRows, RowCount, attention, joined, linear, normalised, pointwise

MAKERS: Mapping[str, float | None] = {
    "aten.zeros.default": 0,
    "aten.ones.default": 1,
    "aten.full.default": None,
    "aten.new_zeros.default": 0,
    "aten.new_ones.default": 1,
    "aten.new_full.default": None,
    "aten.zeros_like.default": 0,
    "aten.ones_like.default": 1,
    "aten.full_like.default": None,
}
"""Operators whose result has the same number everywhere; None: the argument `fill_value`."""

_RESHAPE, _PERMUTE, _MATMUL = "aten.reshape.default", "aten.permute.default", "aten.matmul.default"


@dataclass(frozen=True, slots=True)
class MovedCall(Call):
    """A traced call. `out`: its shape and where its rows are; `factor`: how many numbers are there for each row."""

    out: RowsLayout
    factor: int
    dtype: str


@dataclass
class Mover:
    """Rewrites one call after the other."""

    draft: TracedDraft

    def lower(self, call: MovedCall) -> Traced:
        """Rewrite one call.

        In: a call on `Traced`, and where the trace has the rows of its result. Out: calls with the rows in front, added
        to the program, and their result. Raises `MixesRows` if there is no rewrite.
        """
        handler = self._handler(call.op)
        if handler is None:
            raise MixesRows("the rows are not its first dimension, and it has no form in which they are")
        return handler(call)

    def _handler(self, op: str) -> Callable[[MovedCall], Traced] | None:
        if op in MAKERS:
            return self._make
        operator = VOCABULARY.get(op)
        by_name: dict[str, Callable[[MovedCall], Traced]] = {
            "aten.transpose.int": self._permute,
            "aten.permute.default": self._permute,
            "aten.t.default": self._permute,
            "aten.movedim.int": self._permute,
            "aten.expand.default": self._expand,
            "aten.expand_as.default": self._expand,
            "aten.bmm.default": self._matmul,
            "aten.mm.default": self._matmul,
            _MATMUL: self._matmul,
            "aten.baddbmm.default": self._added,
            "aten.addmm.default": self._added,
            "aten.einsum.default": self._einsum,
            "aten.tensordot.default": self._tensordot,
            "aten.stack.default": self._stack,
            "aten.batch_norm.default": self._by_channel,
            "aten.prelu.default": self._by_channel,
        }
        if op in by_name:
            return by_name[op]
        if op in RESHAPES:
            return self._reshape
        if operator is None:
            return None
        if operator.rule is linear or operator.rule is normalised:
            return self._last_dims
        if operator.rule is attention:
            return self._attention
        if operator.rule is joined:
            return self._cat
        if operator.rule is pointwise or op in ("aten.sub.Tensor", "aten.dropout.default"):
            return self._pointwise
        return self._along if any(one.name in _DIMS for one in schema_of(op).arguments) else None

    def _make(self, call: MovedCall) -> Traced:
        fill = MAKERS[call.op]
        layout = replace(call.out, before=1, after=call.factor)
        fill = call.given.get("fill_value") if fill is None else fill
        sizes = (RowCount(), *layout.stored[1:])
        made = {"size": sizes, "fill_value": fill, "dtype": getattr(torch, call.dtype)}
        return self.draft.call("aten.full.default", layout, call.dtype, **made)

    def _permute(self, call: MovedCall) -> Traced:
        source: Traced = call.arguments["self"]
        order = _order(call, source.layout.ndim)
        layout = source.layout
        place: dict[int, tuple[int, ...]] = {
            dim: (layout.place(dim),) for dim in range(layout.ndim) if dim != layout.at
        }
        place[layout.at] = tuple(range(1 + layout.at, 1 + layout.at + len(layout.inner)))
        dims = (0, *(stored for dim in order for stored in place[dim]))
        made = RowsLayout(call.out.sizes, order.index(layout.at), layout.before, layout.after)
        if dims == tuple(range(len(dims))):
            return replace(source, layout=made)
        return self.draft.call(_PERMUTE, made, source.dtype, self=source, dims=dims)

    def _reshape(self, call: MovedCall) -> Traced:
        source: Traced = call.arguments["self"]
        return self._shaped(source, source.layout.reshaped(call.out.sizes, call.out.at, call.factor))

    def _shaped(self, source: Traced, layout: RowsLayout) -> Traced:
        """Return the source's numbers, in their order, in another layout."""
        if layout.stored == source.layout.stored:
            return replace(source, layout=layout)
        return self.draft.call(_RESHAPE, layout, source.dtype, self=source, shape=layout.stored)

    def _aligned(self, value: Any, layout: RowsLayout, *, keep: int = 0) -> Any:
        """Return an operand with as many dimensions as `layout`, and its rows where that has them.

        `keep`: how many last dimensions a constant may have and stay as it is.
        """
        missing = layout.ndim
        if isinstance(value, Traced):
            missing -= value.layout.ndim
            wanted = (layout.at, layout.before, layout.after)
            if missing < 0 or (value.layout.at + missing, value.layout.before, value.layout.after) != wanted:
                raise MixesRows("its operands have their rows in different places")
            sizes = (*(1,) * missing, *value.layout.sizes)
            return self._shaped(value, replace(value.layout, sizes=sizes, at=layout.at)) if missing else value
        if not isinstance(value, torch.Tensor) or value.dim() <= max(keep, layout.ndim - 1 - layout.at):
            return value
        sizes = (*(1,) * (missing - value.dim()), *value.shape)
        if len(sizes) != layout.ndim or sizes[layout.at] != 1:
            raise MixesRows("it has a number for each row in a constant")
        shape = (1, *sizes[: layout.at], *(1,) * len(layout.inner), *sizes[layout.at + 1 :])
        return self.draft.computed(value.reshape(shape))

    def _like(self, call: MovedCall) -> RowsLayout:
        """Return the layout of the result of an operator that leaves rows where they are."""
        layouts = [value.layout for value in traced_in(call.given)]
        widest = max(layouts, key=lambda layout: layout.ndim)
        return replace(call.out, before=widest.before, after=widest.after)

    def _pointwise(self, call: MovedCall) -> Traced:
        layout = self._like(call)
        made = {name: self._aligned(value, layout) for name, value in call.given.items()}
        return self.draft.call(call.op, layout, call.dtype, **made)

    def _expand(self, call: MovedCall) -> Traced:
        source, layout = call.given["self"], call.out
        if isinstance(source, Traced):
            layout = replace(layout, before=source.layout.before, after=source.layout.after)
        elif call.factor != 1:
            raise MixesRows("it repeats a constant over rows and more")
        source = self._aligned(source, layout)
        if isinstance(source, torch.Tensor) and source.dim() < len(layout.stored):
            source = self.draft.computed(source.reshape((1,) * (len(layout.stored) - source.dim()) + source.shape))
        size = layout.stored if isinstance(source, Traced) else (RowCount(), *layout.stored[1:])
        return self.draft.call("aten.expand.default", layout, call.dtype, self=source, size=size)

    def _along(self, call: MovedCall) -> Traced:
        """Rewrite an operator along dimensions other than the rows."""
        layouts = [value.layout for value in traced_in(call.given)]
        layout = layouts[0]
        if any((one.ndim, one.at, one.inner) != (layout.ndim, layout.at, layout.inner) for one in layouts):
            raise MixesRows("its operands have their rows in different places")
        placed = {}
        for name, dims in call.arguments.items():
            if name not in _DIMS:
                continue
            if dims is None or dims == ():
                raise MixesRows(f"it names no {name}, so it works over all rows at once")
            several = isinstance(dims, tuple | list)
            placed[name] = tuple(layout.place(dim) for dim in dims) if several else layout.place(dims)
        if layout.ndim < call.out.ndim:
            raise MixesRows("it adds a dimension")
        made = replace(call.out, before=layout.before, after=layout.after)
        return self.draft.call(call.op, made, call.dtype, **{**call.given, **placed})

    def _cat(self, call: MovedCall) -> Traced:
        layout = self._like(call)
        parts = tuple(self._aligned(part, layout) for part in call.given["tensors"])
        return self.draft.call(call.op, layout, call.dtype, tensors=parts, dim=layout.place(call.arguments["dim"]))

    def _stack(self, call: MovedCall) -> Traced:
        layout = self._like(call)
        dim = call.arguments["dim"] % layout.ndim
        parts = tuple(self._widened(part, layout, dim) for part in call.given["tensors"])
        return self.draft.call("aten.cat.default", layout, call.dtype, tensors=parts, dim=layout.place(dim))

    def _widened(self, part: Any, layout: RowsLayout, dim: int) -> Traced:
        if not isinstance(part, Traced):
            raise MixesRows("it joins something with one row per candidate to something without rows")
        sizes = (*layout.sizes[:dim], 1, *layout.sizes[dim + 1 :])
        return self._shaped(part, replace(layout, sizes=sizes))

    def _last_dims(self, call: MovedCall) -> Traced:
        """Rewrite an operator over the last dimensions, such as linear and layer_norm."""
        source: Traced = call.given["input"]
        used = len(call.given.get("normalized_shape", (0,)))
        if source.layout.at >= source.layout.ndim - used:
            raise MixesRows("it sums over the rows")
        return self.draft.call(call.op, replace(source.layout, sizes=call.out.sizes), call.dtype, **call.given)

    def _by_channel(self, call: MovedCall) -> Traced:
        """Rewrite batch_norm and prelu: their channels are dimension 1 of the trace, and must be the program's."""
        name = "input" if "input" in call.given else "self"
        source: Traced = call.given[name]
        layout = replace(source.layout, sizes=call.out.sizes)
        channels, ndim = layout.place(1), len(layout.stored)
        order = (0, channels, *(dim for dim in range(1, ndim) if dim != channels))
        back = tuple(order.index(dim) for dim in range(ndim))
        moved = RowsLayout(tuple(layout.stored[dim] for dim in order))
        front = self.draft.call(_PERMUTE, moved, source.dtype, self=source, dims=order)
        made = self.draft.call(call.op, moved, call.dtype, **{**call.given, name: front})
        return self.draft.call(_PERMUTE, layout, call.dtype, self=made, dims=back)

    def _attention(self, call: MovedCall) -> Traced:
        layout = self._like(call)
        if layout.at > layout.ndim - 3:
            raise MixesRows("its rows would attend to each other: give it (rows, tokens, features)")
        made = {name: self._aligned(value, layout, keep=2) for name, value in call.given.items()}
        return self.draft.call(call.op, layout, call.dtype, **made)

    def _matmul(self, call: MovedCall) -> Traced:
        right = call.given.get("mat2", call.given.get("other"))
        return self._product(call.given["self"], right, call)

    def _product(self, left: Any, right: Any, call: MovedCall) -> Traced:
        """Return the matrix product of a call."""
        wide, out = next(value for value in (left, right) if isinstance(value, Traced)).layout, call.out
        layout = replace(out, before=wide.before, after=wide.after)
        if wide.before * wide.after != call.factor:
            raise MixesRows("it multiplies rows with rows")
        if out.at <= out.ndim - 3:
            left, right = self._aligned(left, layout, keep=2), self._aligned(right, layout, keep=2)
        elif isinstance(right, torch.Tensor) and isinstance(left, Traced) and out.at == out.ndim - 2 >= 0:
            left, right, layout = self._row_by_row(left, right, layout)
        else:
            raise MixesRows("it multiplies all rows with all rows, or sums over them")
        product = self.draft.call(_MATMUL, layout, call.dtype, self=left, other=right)
        return self._shaped(product, replace(out, before=wide.before, after=wide.after))

    def _row_by_row(
        self, left: Traced, right: torch.Tensor, layout: RowsLayout
    ) -> tuple[Traced, torch.Tensor, RowsLayout]:
        """Return the operands and the layout of (.., rows, k) by a constant (.., k, n)."""
        if right.dim() == 2:
            return left, right, layout
        if left.layout.inner or right.dim() != layout.ndim:
            raise MixesRows("rows are part of its left matrix")
        spread = replace(left.layout, sizes=(ROWS, *left.layout.sizes[:-2], 1, left.layout.sizes[-1]), at=0)
        made = replace(layout, sizes=(ROWS, *layout.sizes[:-2], 1, layout.sizes[-1]), at=0)
        return self._shaped(left, spread), right, made

    def _added(self, call: MovedCall) -> Traced:
        """Return a matrix product with an operand added to it."""
        given, batched = call.arguments, "batch1" in call.given
        if (given["beta"], given["alpha"]) != (1, 1):
            raise MixesRows("it scales its operands")
        left, right = ("batch1", "batch2") if batched else ("mat1", "mat2")
        product = self._product(given[left], given[right], call)
        other = self._aligned(given["self"], product.layout)
        both = (other, product) if batched else (product, other)
        return self.draft.call("aten.add.Tensor", product.layout, call.dtype, self=both[0], other=both[1])

    def _einsum(self, call: MovedCall) -> Traced:
        left, arrow, out = call.arguments["equation"].replace(" ", "").partition("->")
        if not arrow or "." in left:
            raise MixesRows("its equation does not name all dimensions")
        operands = list(call.arguments["tensors"])
        words = left.split(",")
        letter = ""
        for index, (word, operand) in enumerate(zip(words, operands, strict=True)):
            if not isinstance(operand, Traced):
                continue
            if operand.layout.inner or letter not in ("", word[operand.layout.at]):
                raise MixesRows("its operands have their rows in different places")
            letter = word[operand.layout.at]
            words[index] = letter + word.replace(letter, "")
        if letter not in out:
            raise MixesRows("it sums over the rows")
        equation = f"{','.join(words)}->{letter}{out.replace(letter, '')}"
        layout = replace(call.out, at=out.index(letter))
        return self.draft.call("aten.einsum.default", layout, call.dtype, equation=equation, tensors=tuple(operands))

    def _tensordot(self, call: MovedCall) -> Traced:
        left, right = call.arguments["self"], call.arguments["other"]
        ndims = [value.layout.ndim if isinstance(value, Traced) else value.dim() for value in (left, right)]
        words = ["abcdefghijkl"[: ndims[0]], "mnopqrstuvwx"[: ndims[1]]]
        for one, other in zip(call.arguments["dims_self"], call.arguments["dims_other"], strict=True):
            words[1] = words[1].replace(words[1][other], words[0][one])
        out = "".join(letter for letter in words[0] + words[1] if (letter in words[0]) != (letter in words[1]))
        made = {"equation": f"{words[0]},{words[1]}->{out}", "tensors": (left, right)}
        return self._einsum(replace(call, op="aten.einsum.default", given=made))


_DIMS = frozenset({"dim", "dims"})


def _order(call: MovedCall, ndim: int) -> list[int]:
    """Return the traced dimensions in the order of the result."""
    order = list(range(ndim))
    given = call.arguments
    if call.op == "aten.permute.default":
        return [dim % ndim for dim in given["dims"]]
    if call.op == "aten.movedim.int":
        moved = order.pop(given["source"] % ndim)
        order.insert(given["destination"] % ndim, moved)
        return order
    one, other = (0, ndim - 1) if call.op == "aten.t.default" else (given["dim0"] % ndim, given["dim1"] % ndim)
    order[one], order[other] = order[other], order[one]
    return order
