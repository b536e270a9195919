"""Builds a program from the nodes of a trace, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from plait_disagg.graph.capture.appender import Appender, ProgramParts
from plait_disagg.graph.capture.embeddings import BagCall, bag_call
from plait_disagg.graph.capture.exported import Exported
from plait_disagg.graph.capture.lower import Lowered, bind, functional_name, lower_part, lower_placement, why_unknown
from plait_disagg.graph.capture.rows_first import MAKERS, MovedCall, Mover
from plait_disagg.graph.capture.source_lines import module_hint, source_line
from plait_disagg.graph.capture.traced import RowsLayout, Traced, Unknown, dtype_of, leaves, side_of, varies
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.inputs import OFFSETS, Bag, Input, ports_of, tensor_names
from plait_disagg.graph.operators import VOCABULARY, overload
from plait_disagg.graph.program import LOOKUP, ROWS, USER_OF, Arg, Node, Port, Ref
from plait_disagg.graph.rows import PER_ROW, Fact, MixesRows, RowCount


@dataclass
class Builder(ProgramParts):
    """A program in the making.

    `values` holds what each node of the trace became: a `Traced`, a constant tensor (or a tuple of them), a refusal
    that is raised when it is read, or None.
    """

    exported: Exported
    inputs: Sequence[Input]
    lenient: bool = False  # go on behind what is refused
    met: list[UnsupportedOperator] = field(default_factory=list)
    values: dict[fx.Node, Any] = field(default_factory=dict)  # Traced, a constant tensor (or tuple of them), a number
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    refusals: list[UnsupportedOperator] = field(default_factory=list)
    moved: bool = False  # whether any operator was rewritten

    def __post_init__(self) -> None:
        self.ports = {port.name: port for port in ports_of(self.inputs)}
        self.taken = dict.fromkeys((*self.ports, USER_OF), 1)

    def add(self, node: fx.Node) -> None:
        """Add one node of the trace."""
        if node.op == "placeholder":
            self._add_placeholder(node)
        elif node.op == "call_function":
            try:
                self._add_call(node)
            except UnsupportedOperator as refused:  # raised when it is read: what flattens a bag of equal rows is not
                self.values[node] = self._refused(refused, node)
        elif node.op != "output":
            raise UnsupportedOperator(f"{node.op} {node.target}", "it is not an operator", source_line(node))

    def _refused(self, refused: UnsupportedOperator, node: fx.Node) -> UnsupportedOperator:
        """Return the refusal for the author of the model. One that was only read again stays as it is."""
        if refused in self.refusals:
            return refused
        made = UnsupportedOperator(
            refused.operator, refused.why + module_hint(node), refused.where or source_line(node)
        )
        self.refusals.append(made)
        return made

    def _add_placeholder(self, node: fx.Node) -> None:
        tensor = self.exported.constant(node)
        if tensor is not None:
            name, found = tensor
            self.values[node] = found
            self.names.setdefault(id(found), self.name(name))
            return
        port = self.ports[self.exported.input_name(node)]
        fact = Fact(port.shape, _counts(port, self.inputs))
        self.values[node] = Traced(Ref(port.name), fact, port.rows, port.dtype, RowsLayout(port.shape))

    def _add_call(self, node: fx.Node) -> None:
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._add_python_call(node)
        where = source_line(node)
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat):
            return None  # a number: its reader judges it
        name = functional_name(node)
        call = bag_call(node)
        if call is not None and not isinstance(self.read(call.ids), torch.Tensor):
            self.values[node] = _Lookups(self, node, source_line(node)).add(call)
            return None
        picked = _picked_by(node, self.exported)
        if picked is not None:
            self.values[node] = _StepGather(self, node, where).add(*picked)
            return None
        arguments, given = self._bound(node, where)
        if not varies(arguments):
            self.values[node] = self._fold(node, arguments, where)
            return None
        if isinstance(node.meta.get("val"), tuple | list):
            self.values[node] = None  # its parts are asked for one by one
            return None
        self.values[node] = self._emit(node, lower_placement(node, Lowered(name, arguments, given)), where)
        return None

    def _add_python_call(self, node: fx.Node) -> None:
        """Handle getitem on a list of tensors; any other call makes a number, which its reader checks."""
        parent = node.args[0] if node.args else None
        if node.target is not getitem or not isinstance(parent, fx.Node):
            return
        made = self.read(parent)
        if isinstance(made, tuple | list):
            self.values[node] = made[int(node.args[1])]  # type: ignore[arg-type]
        elif isinstance(made, Traced) and node.args[1] == 0:  # an embedding bag: its first result is the pooled rows
            self.values[node] = made
        else:
            where = source_line(parent)
            arguments, _ = self._bound(parent, where)
            part = lower_part(parent, int(node.args[1]), arguments, where)  # type: ignore[arg-type]
            self.values[node] = self._emit(node, part, where)

    def _emit(self, node: fx.Node, lowered: Lowered, where: str) -> Traced:
        """Add a call, or what computes the same where the rows are not in front."""
        out = self.exported.layout(node, lowered.op, where)
        operands = [value for value in leaves(lowered.arguments) if isinstance(value, Traced)]
        plain = all(value.layout.is_plain for value in operands) and (out is None or (out[0].at, out[1]) == (0, 1))
        appender = Appender(self, node.name, where)
        refused = None
        expanded = lowered.op == "aten.expand_as.default" and isinstance(lowered.arguments["self"], torch.Tensor)
        fresh = expanded or lowered.op in MAKERS  # made for as many rows as its reader has
        if plain and not fresh:
            shape = self.exported.shape(node, lowered.op, where)
            try:
                return appender.append(
                    lowered.op, lowered.arguments, lowered.given, RowsLayout(shape), dtype_of(node.meta["val"])
                )
            except UnsupportedOperator as error:
                refused = error
        try:
            if out is None:
                raise MixesRows("its result does not have the rows in one dimension: rows meet rows, or are lost")
            made = Mover(appender).lower(
                MovedCall(lowered.op, lowered.arguments, lowered.given, *out, dtype_of(node.meta["val"]))
            )
        except (MixesRows, UnsupportedOperator) as error:
            if refused is not None:
                raise refused from error
            if isinstance(error, UnsupportedOperator):
                raise
            known = lowered.op in VOCABULARY
            raise UnsupportedOperator(lowered.op, str(error) if known else why_unknown(lowered.op), where) from error
        self.moved = self.moved or not fresh
        return made

    def _fold(self, node: fx.Node, arguments: Mapping[str, Any], where: str) -> Any:
        """Compute now what depends on parameters alone."""
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise UnsupportedOperator(str(target), "it is random", where)
        if any(isinstance(value, Unknown) for value in leaves(arguments)):
            raise UnsupportedOperator(str(target), "it uses a number that depends on the request", where)
        if target._schema.is_mutable:
            name = functional_name(node)
            if name not in VOCABULARY:
                raise UnsupportedOperator(str(target), why_unknown(name), where)
            target = overload(name)
        args = fx.map_arg(node.args, self.read)
        kwargs = fx.map_arg(node.kwargs, self.read)
        made = target(*args, **kwargs)
        if not isinstance(made, tuple | list):
            return self.named(made, node.name)
        return [self.named(part, node.name) for part in made]

    def read(self, node: fx.Node) -> Any:
        """Return what a node of the trace became. Raises `UnsupportedOperator` if that was refused."""
        value = self.values.get(node)
        if isinstance(value, UnsupportedOperator) and self.lenient:
            self.met.append(value)
            value = self.values[node] = self._assumed(node, value)
        if isinstance(value, UnsupportedOperator):
            raise value.with_traceback(None)
        return value

    def _assumed(self, node: fx.Node, refused: UnsupportedOperator) -> Any:
        """Return a value in place of one that was refused: of its shape, and with its rows apart."""
        try:
            out = self.exported.layout(node, refused.operator, refused.where)
        except UnsupportedOperator:
            return refused
        if out is None:
            return refused
        layout = replace(out[0], after=out[1])
        return Traced(Ref(USER_OF), Fact(layout.stored, PER_ROW), "item", dtype_of(node.meta["val"]), layout)

    def _bound(self, node: fx.Node, where: str) -> tuple[dict[str, Any], frozenset[str]]:
        bound, given = bind(node)
        return {name: self._argument(value, where) for name, value in bound.items()}, given

    def _argument(self, value: Any, where: str) -> Any:
        """Return an argument of the trace with its nodes replaced by `Traced`, tensors and `RowCount`."""
        if isinstance(value, fx.Node):
            traced = value.meta.get("val")
            if isinstance(traced, torch.SymInt | torch.SymFloat | torch.SymBool):
                return RowCount() if self.exported.is_row_count(traced) else Unknown(str(traced))
            return self.read(value)
        if isinstance(value, torch.SymInt):
            return RowCount() if self.exported.is_row_count(value) else Unknown(str(value))
        if isinstance(value, tuple | list):
            return tuple(self._argument(part, where) for part in value)
        return value


def _counts(port: Port, inputs: Sequence[Input]) -> str:
    for item in inputs:
        if isinstance(item, Bag) and port.name in tensor_names((item,)):
            return f"{'offsets' if port.name == item.name + OFFSETS else 'ids'}:{item.name}"
    return PER_ROW


# Each row's own step: `x[torch.arange(rows), steps]`, which libraries write to read the last step of a history.


def _picked_by(node: fx.Node, exported: Exported) -> tuple[fx.Node, fx.Node] | None:
    """Return source and steps of a call that picks a step of every row, or None for any other operator."""
    if str(node.target) != "aten.index.Tensor" or len(node.args[1]) != 2:  # type: ignore[arg-type]
        return None
    given: Any = node.args
    source, (row, step) = given
    if not all(isinstance(one, fx.Node) for one in (source, row, step)) or not _is_every_row(row, exported):
        return None
    return source, step


def _is_every_row(node: fx.Node, exported: Exported) -> bool:
    """Return whether a value is 0, 1, ... up to the number of rows."""
    places = {"aten.arange.default": 0, "aten.arange.start": 1, "aten.arange.start_step": 1}
    place = places.get(str(node.target))
    if place is None:
        return False
    end: Any
    end, others = node.args[place], [node.args[index] for index in range(len(node.args)) if index != place]
    starts = all(value == wanted for value, wanted in zip(others, (0, 1), strict=False))
    return starts and isinstance(end, fx.Node) and exported.is_row_count(end.meta["val"])


@dataclass(frozen=True, slots=True)
class _StepGather:
    """Adds the calls that one such pick becomes."""

    builder: Builder
    node: fx.Node
    where: str

    def add(self, source: fx.Node, steps: fx.Node) -> Traced:
        """Return each row's step, gathered. A step below 0 counts from the end."""
        values, which = self.builder.read(source), self.builder.read(steps)
        for one, ndim in ((values, None), (which, 1)):
            whole = isinstance(one, Traced) and one.layout.is_plain and one.fact.counts == PER_ROW
            if not whole or (ndim or one.fact.ndim) != one.fact.ndim:
                raise UnsupportedOperator("aten.index.Tensor", "it picks among the rows", self.where)
        _, length, *behind = values.layout.sizes
        call = Appender(self.builder, self.node.name, self.where).call
        negative = call("aten.lt.Scalar", which, "bool", other=0)
        from_end = call("aten.add.Scalar", which, which.dtype, other=length)
        counted = call("aten.where.self", negative, which.dtype, self=from_end, other=which)
        narrow, wide = (ROWS, 1, *(1 for _ in behind)), (ROWS, 1, *behind)
        index = call("aten.reshape.default", counted, which.dtype, narrow, shape=narrow)
        if behind:
            index = call("aten.expand.default", index, which.dtype, wide, size=wide)
        picked = call("aten.gather.default", values, values.dtype, wide, dim=1, index=index)
        return call("aten.squeeze.dim", picked, values.dtype, (ROWS, *behind), dim=1)


@dataclass(frozen=True, slots=True)
class _Lookups:
    """Adds the lookup of one node of the trace."""

    builder: Builder
    node: fx.Node
    where: str

    def add(self, call: BagCall) -> Traced:
        """Add one lookup and return its rows. Raises `UnsupportedOperator` if it cannot be served."""
        where = self.where
        weight = self.builder.values.get(call.table)
        ids = self.builder.read(call.ids)
        if not isinstance(weight, torch.Tensor) or not isinstance(ids, Traced):
            raise UnsupportedOperator(call.op, "its table is not a parameter of the module", where)
        call.check_table(weight, where)
        offsets = self._offsets(call, ids, where)
        weights = self._weights(call, ids, where)
        left = self._counted(call, ids) if call.leaves_out(weight) else None
        if left is not None:
            weights = (
                left if weights is None else self._appender.call("aten.mul.Tensor", left, "float32", other=weights)
            )
        table = self.builder.names[id(weight)].removesuffix(".weight")
        self.builder.tables[table] = weight
        pooled = call.mode != "rows"
        shape = ((ROWS,) if pooled else ids.fact.shape) + (weight.shape[1],)
        name = self.builder.name(table)
        args: tuple[Arg, ...] = (ids.ref, offsets, weights.ref if weights is not None else None)
        side = side_of({"ids": ids, "weights": weights})
        kwargs: dict[str, Arg] = {"table": table, "mode": "sum" if left is not None else call.mode}
        self.builder.nodes.append(Node(name=name, op=LOOKUP, args=args, kwargs=kwargs, shape=shape, rows=side))
        fact = Fact(shape, PER_ROW if pooled else ids.fact.counts)
        layout = RowsLayout(shape) if pooled else replace(ids.layout, sizes=(*ids.layout.sizes, weight.shape[1]))
        rows = Traced(Ref(name), fact, side, "float32", layout)
        return rows if left is None or call.mode == "sum" else self._shared_out(rows, left)

    def _weights(self, call: BagCall, ids: Traced, where: str) -> Traced | None:
        """Return the number that each id's row is multiplied with, in the shape of the ids; None for 1."""
        if call.weights is None:
            return None
        made = self.builder.read(call.weights)
        if not isinstance(made, Traced) or (made.fact, made.layout.is_plain) != (ids.fact, True):
            how = "have the shape of the ids, and for a bag with offsets be computed from its own ids"
            raise UnsupportedOperator(call.op, f"per_sample_weights must {how}", where)
        return made

    def _counted(self, call: BagCall, ids: Traced) -> Traced:
        """Return 1.0 for every id that counts and 0.0 for padding."""
        self.builder.moved = True
        counts = self._appender.call("aten.ne.Scalar", ids, "bool", other=call.padding_idx)
        return self._appender.call("aten.to.dtype", counts, "float32", dtype=torch.float32)

    def _shared_out(self, rows: Traced, left: Traced) -> Traced:
        """Return sums divided by the number of ids that count, or by 1 if there are none."""
        call = self._appender.call
        count = call("aten.sum.dim_IntList", left, "float32", (ROWS, 1), dim=(1,), keepdim=True)
        return call("aten.div.Tensor", rows, "float32", other=call("aten.clamp_min.default", count, "float32", min=1))

    @property
    def _appender(self) -> Appender:
        return Appender(self.builder, self.node.name, self.where)

    def _offsets(self, call: BagCall, ids: Traced, where: str) -> Ref | None:
        """Return the bag's own offsets, or None for ids in equal rows or ids that are not pooled."""
        if call.mode == "rows" or call.equal_rows:
            if not ids.layout.is_plain and call.mode != "rows":
                raise UnsupportedOperator(call.op, "its ids must have one row per candidate", where)
            if ids.fact.counts is None or (call.mode != "rows" and ids.fact.ndim != 2):
                raise UnsupportedOperator(call.op, "its ids must have one row per candidate", where)
            return None
        value = self.builder.read(call.offsets) if call.offsets is not None else None
        kind, _, bag = (ids.fact.counts or "").partition(":")
        wanted = f"{'offsets' if call.include_last else 'starts'}:{bag}"
        if kind != "ids" or not isinstance(value, Traced) or value.fact.counts != wanted:
            how = "as they are (include_last_offset=True) or without the last (offsets[:-1])"
            raise UnsupportedOperator(call.op, f"a bag must be looked up with its own offsets, {how}", where)
        return Ref(bag + OFFSETS)
