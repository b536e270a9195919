"""Exact rewrites of a captured program, so that less is computed and less crosses. Every bit stays as it is.

    to(x, its own dtype), detach(x), x[:]   x
    slice(cat(a, b, c))                     the parts, or slices of them (along another dimension where sides mix)
    slice(unsqueeze(stack(a, b)))           unsqueeze(unsqueeze(a))
    select(stack(a, b), i)                  a or b
    cat(slice(x, 0, 3), slice(x, 3, 8))     slice(x, 0, 8)
    cat(cat(a, b), c)                       cat(a, b, c)                       where a is the user's and b is not
    flatten(cat(a, b))                      cat(flatten(a), flatten(b))        likewise
    unflatten(flatten(x)), squeeze(unsqueeze(x))     x
    lookup(cat(a, b) + constant)            cat(lookup(a + its part), lookup(b + its part))    likewise
    lookup(ids that are the same for all rows)       those rows of the table, a constant that no request has to send
    two calls of one operator with the same operands (also lookups)     one

A model that packs its features into one matrix and slices them out again would otherwise make the user's features
candidates' features. Sides are derived anew: what is cut out of a mixture has the side of its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from math import prod

import torch

from plait_disagg.graph.edit import Draft, map_refs, rows_side
from plait_disagg.graph.execute import run_reference
from plait_disagg.graph.operators import RESHAPES, SIZE
from plait_disagg.graph.program import LOOKUP, ROWS, USER_OF, Arg, DType, Node, Program, Ref

_CAT, _STACK, _SLICE = "aten.cat.default", "aten.stack.default", "aten.slice.Tensor"
_UNSQUEEZE = "aten.unsqueeze.default"
_SELECT, _RESHAPE, _EXPAND = "aten.select.int", "aten.reshape.default", "aten.expand.default"
_IDENTITIES = frozenset(
    {"aten.alias.default", "aten.detach.default", "aten.dropout.default", "aten.lift_fresh_copy.default"}
)
_CASTS = frozenset({"aten.to.dtype", "aten._to_copy.default", "aten.type_as.default"})
_SPLIT = frozenset({"aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.remainder.Scalar", *_CASTS})


def fold(
    program: Program, constants: Mapping[str, torch.Tensor], tables: Mapping[str, torch.Tensor]
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Return `program` (as captured) with every such rewrite applied, in one walk, and its constants."""
    work = _Folding(Draft(program, constants), tables)
    for node in program.nodes:
        work.add(node)
    return work.values.finished(tuple((name, work.same.get(ref.name, ref)) for name, ref in program.outputs))


@dataclass
class _Folding:
    values: Draft
    tables: Mapping[str, torch.Tensor]
    same: dict[str, Ref] = field(default_factory=dict)
    made: dict[object, Ref] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        """Add the next node, or note what it is equal to."""
        found = self._put(map_refs(node, lambda ref: self.same.get(ref.name, ref)))
        if found.name != node.name:
            self.same[node.name] = found

    def _put(self, node: Node) -> Ref:
        """Return a value equal to `node`: something simpler, something made before, or the node, which is added."""
        simpler = self._simpler(node)
        if simpler is not None:
            return simpler
        key = (node.op, _typed(node.args), _typed(tuple(sorted(node.kwargs.items()))), node.dtype)
        if key not in self.made:
            read = (self.values[name] for name in node.inputs)
            side = rows_side(value.rows for value in read if value.dtype != "int")
            self.made[key] = self.values.add(replace(node, rows=side))
        return self.made[key]

    def _simpler(self, node: Node) -> Ref | None:
        if node.op == SIZE or not node.parts:
            return None
        if node.op == LOOKUP or (node.op in _SPLIT and node.dtype.startswith("int")):
            parts = self._by_part(node)
            if parts is not None:
                return parts
        if node.op == LOOKUP:
            return self._same_for_all(node)
        if node.op == _CAT:
            return self._joined(node)
        return self._cast_or_layout(node)

    def _cast_or_layout(self, node: Node) -> Ref | None:
        source = node.parts[0]
        value = self.values[source.name]
        if node.op in _IDENTITIES or (node.op == _SLICE and _is_whole(node)):
            return source
        if node.op in _CASTS and value.dtype == node.dtype and value.shape == node.shape:
            return source
        if node.op in RESHAPES:
            return self._reshaped(node, source)
        if node.op == _SELECT and isinstance(value, Node):
            return self._selected(node, value)
        if node.op == _SLICE and isinstance(value, Node):
            return self._sliced(node, value)
        return None

    def _same_for_all(self, node: Node) -> Ref | None:
        """Return the rows of a lookup whose ids are the same for all rows, such as positions, expanded."""
        (ids,) = node.parts
        made_by = self.values[ids.name]
        if made_by.rows != "none" or made_by.shape[:1] != (ROWS,) or node.kwargs["mode"] != "rows":
            return None
        needed, constants = self.values.finished((("ids", ids),))
        if any(one.op == LOOKUP for one in needed.nodes):
            return None
        counted = {port.name: torch.empty(2) for port in needed.inputs}  # of the request, it reads how many rows
        two = run_reference(needed, constants, None, counted)[ids.name]
        if not torch.equal(two[0], two[1]):
            return None
        rows = self.values.row_count(Ref(USER_OF))
        table = self.tables[str(node.kwargs["table"])]
        held = self.values.constant(f"{node.name}:rows", table[two[:1].long()])
        return self._put(replace(node, op=_EXPAND, args=(held, (rows, *node.shape[1:])), kwargs={}))

    def _by_part(self, node: Node) -> Ref | None:
        """Split a lookup, or arithmetic on ids, of the user's and candidates' ids side by side."""
        mixed = [
            value
            for ref in node.args
            if isinstance(ref, Ref) and isinstance(value := self.values[ref.name], Node) and self._mixes(value)
        ]
        dim = _dim(mixed[0]) if len(mixed) == 1 else 0
        pooled = node.op == LOOKUP and (node.kwargs["mode"] != "rows" or node.args[2] is not None)
        if not dim or pooled or node.shape[: dim + 1] != mixed[0].shape[: dim + 1]:
            return None
        made = []
        for part, start, end in self._sides(mixed[0], dim):
            args = tuple(self._share(argument, mixed[0], part, dim, (start, end)) for argument in node.args)
            if None in args and node.op != LOOKUP:
                return None
            shape = (*node.shape[:dim], end - start, *node.shape[dim + 1 :])
            made.append(self._put(replace(node, name=f"{node.name}:{start}", args=args, shape=shape)))
        return self._put(replace(node, op=_CAT, args=(tuple(made), dim), kwargs={}))

    def _sides(self, cat: Node, dim: int) -> list[tuple[Ref, int, int]]:
        """Return the parts of a mixed cat and their places, neighbours of one side joined."""
        found = []
        for _, some in groupby(self._parts(cat, dim), key=lambda part: self.values[part[0].name].rows):
            places = list(some)
            parts, start, end = tuple(part for part, _, _ in places), places[0][1], places[-1][2]
            shape = (*cat.shape[:dim], end - start, *cat.shape[dim + 1 :])
            joined = replace(cat, name=f"{cat.name}:{start}", args=(parts, dim), shape=shape)
            found.append((parts[0] if len(parts) == 1 else self._put(joined), start, end))
        return found

    def _share(self, argument: Arg, mixed: Node, part: Ref, dim: int, place: tuple[int, int]) -> Arg:
        """Return what stands in place of an argument for one part of a mixed cat; None if it cannot be told."""
        if not isinstance(argument, Ref):
            return argument
        if argument.name == mixed.name:
            return part
        tensor = self.values.tensor(argument.name)
        if tensor is None:
            return None
        along, (start, end) = dim - (len(mixed.shape) - tensor.dim()), place
        if along < 0 or tensor.shape[along] == 1:
            return argument
        name = f"{argument.name}:{along}:{start}:{end}"
        return self.values.constant(name, tensor.narrow(along, start, end - start).contiguous())

    def _joined(self, node: Node) -> Ref | None:
        """Flatten a cat of cats and join neighbouring slices of one value."""
        dim = _dim(node)
        if dim == 0:
            return None
        parts: list[Ref] = []
        for part in node.parts:
            inner = self.values[part.name]
            nested = isinstance(inner, Node) and self._mixes(inner) and _dim(inner) == dim
            parts += inner.parts if isinstance(inner, Node) and nested else [part]
        joined: list[Ref] = []
        for part in parts:
            left, right = self._range(joined[-1], dim) if joined else None, self._range(part, dim)
            if left is None or right is None or left[0] != right[0] or left[2] != right[1]:
                joined.append(part)
            else:  # slices of one value, side by side
                name = f"{node.name}:{joined[-1].name}:{part.name}"
                joined[-1] = self._range_of(left[0], dim, left[1], right[2], name)
        if len(joined) == 1:
            return joined[0]
        if tuple(joined) == node.parts:
            return None
        return self._put(replace(node, args=(tuple(joined), dim)))

    def _mixes(self, node: Node) -> bool:
        """Return whether a node is a cat of the user's values and candidates' values."""
        return node.op == _CAT and {"user", "item"} <= {self.values[name].rows for name in node.inputs}

    def _range(self, ref: Ref, dim: int) -> tuple[Ref, int, int] | None:
        """Return what a value is a slice of along `dim`, and from where to where."""
        node = self.values[ref.name]
        if not isinstance(node, Node) or node.op != _SLICE or _dim(node) != dim:
            return None
        (source,) = node.parts
        found = _bounds(node, self.values[source.name].shape[dim])
        return None if found is None else (source, *found)

    def _range_of(self, source: Ref, dim: int, start: int, end: int, name: str) -> Ref:
        """Return `source` from `start` to `end` along `dim`."""
        value = self.values[source.name]
        if (start, end) == (0, value.shape[dim]):
            return source
        shape = (*value.shape[:dim], end - start, *value.shape[dim + 1 :])
        return self._put(
            Node(name=name, op=_SLICE, args=(source, dim, start, end), shape=shape, dtype=value.dtype, rows=value.rows)
        )

    def _reshaped(self, node: Node, source: Ref) -> Ref | None:
        """Skip what a reshape undoes, and reshape the parts of a cat instead of the cat."""
        value = self.values[source.name]
        while isinstance(value, Node) and value.op in RESHAPES and value.shape.count(ROWS) == 1:
            (at,) = value.parts
            value = self.values[at.name]
            if value.shape == node.shape:
                return at
        if self.values[source.name].shape == node.shape:
            return source
        value = self.values[source.name]
        flat = node.shape[:1] == (ROWS,) and len(node.shape) == 2
        if not flat or not isinstance(value, Node) or not self._mixes(value) or _dim(value) != 1:
            return None
        parts = []
        for number, part in enumerate(value.parts):
            inner = self.values[part.name]
            shape = (ROWS, prod(inner.shape[1:]))
            flattened = replace(node, name=f"{node.name}:{number}", op=_RESHAPE, args=(part, shape), kwargs={})
            parts.append(self._put(replace(flattened, shape=shape, dtype=inner.dtype)))
        return self._put(replace(node, op=_CAT, args=(tuple(parts), 1), kwargs={}))

    def _selected(self, node: Node, value: Node) -> Ref | None:
        dim, index = _dim(node, len(value.shape)), node.args[2]
        if not isinstance(index, int) or dim == 0:
            return None
        index %= value.shape[dim]
        if value.op == _STACK and _dim(value) == dim:
            return value.parts[index]
        for part, start, end in self._parts(value, dim):
            if start <= index < end:
                return self._put(replace(node, args=(part, dim, index - start)))
        return None

    def _sliced(self, node: Node, value: Node) -> Ref | None:
        dim = _dim(node)
        bounds = _bounds(node, value.shape[dim]) if dim else None
        if bounds is None:
            return None
        start, end = bounds
        if (start, end) == (0, value.shape[dim]):
            return Ref(value.name)
        below = self._sliced_below(node, value, dim, start, end)
        if below is not None:
            return below
        inner = self._range(Ref(value.name), dim)
        if inner is not None:
            return self._range_of(inner[0], dim, inner[1] + start, inner[1] + end, node.name)
        kept = []
        for part, first, last in self._parts(value, dim):
            low, high = max(start, first) - first, min(end, last) - first
            if low < high:
                kept.append(self._range_of(part, dim, low, high, f"{node.name}:{first}"))
        if len(kept) < 2:
            return kept[0] if kept else None
        return self._put(replace(node, op=_CAT, args=(tuple(kept), dim), kwargs={}))

    def _sliced_below(self, node: Node, value: Node, dim: int, start: int, end: int) -> Ref | None:
        """Return a slice taken before its operand was stacked, unsqueezed or joined with others' values."""
        if value.op == _STACK and _dim(value) == dim and end - start == 1:
            return self._put(replace(node, op=_UNSQUEEZE, args=(value.parts[start], dim), kwargs={}))
        if value.op == _UNSQUEEZE and _dim(value) != dim:
            added, source = _dim(value), self.values[value.parts[0].name]
            along = dim - (added < dim)
            if not isinstance(source, Node) or source.op not in (_STACK, _UNSQUEEZE) or not along:
                return None
            part = self._range_of(value.parts[0], along, start, end, f"{node.name}:below")
            return self._put(replace(node, op=_UNSQUEEZE, args=(part, added), kwargs={}))
        if self._mixes(value) and _dim(value) != dim:
            places = enumerate(value.parts)
            parts = tuple(self._range_of(ref, dim, start, end, f"{node.name}:{at}") for at, ref in places)
            return self._put(replace(node, op=_CAT, args=(parts, _dim(value)), kwargs={}))
        return None

    def _parts(self, value: Node, dim: int) -> list[tuple[Ref, int, int]]:
        """Return the parts of a cat along `dim` and their places; nothing for any other value."""
        if value.op != _CAT or _dim(value) != dim:
            return []
        sizes = [self.values[part.name].shape[dim] for part in value.parts]
        ends = accumulate(sizes)
        return [(part, end - size, end) for part, size, end in zip(value.parts, sizes, ends, strict=True)]


def _dim(node: Node, ndim: int | None = None) -> int:
    """Return the dimension that the second argument names (0 if it is left out), counted from the front."""
    given = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(given, int)
    return given % (ndim or len(node.shape))


def _ends(node: Node) -> tuple[Arg, ...]:
    """Return start, end and step of a slice."""
    return (*node.args, *(None, 0, None, None, 1)[len(node.args) :])[2:5]


def _is_whole(node: Node) -> bool:
    """Return whether a slice, of however many rows, leaves nothing out."""
    start, end, step = _ends(node)
    return start in (0, None) and (end is None or (isinstance(end, int) and end >= 2**62)) and step == 1


def _bounds(node: Node, length: int) -> tuple[int, int] | None:
    """Return from where to where a slice reaches, or None if it leaves some out."""
    start, end, step = _ends(node)
    if step != 1 or isinstance(start, Ref) or isinstance(end, Ref) or length < 0:
        return None
    first, last, _ = slice(start, end).indices(length)
    return (first, last) if first < last else None


def _typed(argument: Arg | tuple[object, ...]) -> object:
    """Return an argument as a key: 1, 1.0 and True are different."""
    if isinstance(argument, tuple):
        return tuple(_typed(part) for part in argument)  # type: ignore[arg-type]
    return argument if isinstance(argument, Ref | DType) else (type(argument), repr(argument))
