"""From a module to a program: `torch.export` traces it, and every operator is checked before it is accepted.

ATen overloads stay as the module called them (nothing is decomposed), so a program reproduces the module bit for
bit. On the way, embedding operators become `plait.lookup`; whatever depends on parameters alone is computed once and
becomes a constant; in-place operators on values that nothing else reads become their functional equivalents;
`split`, `chunk` and `unbind` become slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from plait_disagg.graph.bags import BagCall, bag_call
from plait_disagg.graph.edit import lookups_of, simplify
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.exported import Exported, export, module_hint, source_line
from plait_disagg.graph.inputs import OFFSETS, Bag, Input, check_inputs, ports_of
from plait_disagg.graph.lower import Lowered, bind, functional_name, lower_part, why_unknown
from plait_disagg.graph.operators import SIZE, VOCABULARY, overload
from plait_disagg.graph.program import LOOKUP, ROWS, USER_OF, Arg, Node, Port, Program, Ref, Rows
from plait_disagg.graph.rows import PER_ROW, Fact, MixesRows, OperatorCall, RowCount
from plait_disagg.tables.values import Lookup

__all__ = ["Captured", "capture"]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A module as a program.

    `constants` (by `Port` name) and `tables` (by `Lookup.table`) are the module's own tensors.
    """

    program: Program
    constants: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]
    lookups: tuple[Lookup, ...]
    inputs: tuple[Input, ...]


def capture(module: nn.Module, inputs: Sequence[Input]) -> Captured:
    """Capture the module's `forward` (in evaluation mode, called with the tensors of `inputs` by name) as a program.

    Every input and every output has one row per candidate. Raises `UnsupportedOperator`, or ValueError for an
    invalid declaration. The module is not changed.
    """
    check_inputs(inputs)
    if module.training:
        raise UnsupportedOperator(type(module).__name__, "it is in training mode: call module.eval() first")
    exported = export(module, inputs)
    builder = _Builder(exported, inputs)
    with torch.no_grad():
        for node in exported.live_nodes():
            builder.add(node)
    return builder.finish(inputs)


@dataclass(frozen=True, slots=True)
class _Value:
    """A traced tensor: the argument for it, what is known about it, and whose rows it has."""

    ref: Ref
    fact: Fact
    rows: Rows


@dataclass
class _Builder:
    exported: Exported
    inputs: Sequence[Input]
    values: dict[fx.Node, Any] = field(default_factory=dict)  # _Value, a constant tensor (or tuple of them), a number
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # id of a constant tensor to its name

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
                where = refused.where or source_line(node)
                self.values[node] = UnsupportedOperator(refused.operator, refused.why + module_hint(node), where)
        elif node.op != "output":
            raise UnsupportedOperator(f"{node.op} {node.target}", "it is not an operator", source_line(node))

    def finish(self, inputs: Sequence[Input]) -> Captured:
        """Return the program, with its outputs named."""
        outputs = []
        for name, node in self.exported.outputs():
            value = self._read(node) if node is not None else None
            if not isinstance(value, _Value) or value.fact.counts != PER_ROW:
                raise UnsupportedOperator("output", f"{name} does not have one row per candidate")
            outputs.append((name, value.ref))
        used = {ref for node in self.nodes for ref in node.inputs}
        constants = {name: tensor for name, tensor in self.constants.items() if name in used}
        user_of = Port(name=USER_OF, shape=(ROWS,), dtype="int64", rows="item")
        program = Program(
            inputs=(*self.ports.values(), user_of),
            constants=tuple(
                Port(name=name, shape=tuple(tensor.shape), dtype=_dtype(tensor), rows="none")
                for name, tensor in constants.items()
            ),
            nodes=tuple(self.nodes),
            outputs=tuple(outputs),
        )
        program = simplify(program)
        return Captured(
            program=program,
            constants={port.name: constants[port.name] for port in program.constants},
            tables=self.tables,
            lookups=lookups_of(program),
            inputs=tuple(inputs),
        )

    def _add_placeholder(self, node: fx.Node) -> None:
        tensor = self.exported.constant(node)
        if tensor is not None:
            name, found = tensor
            self.values[node] = found
            self.names.setdefault(id(found), self._name(name))
            return
        port = self.ports[self.exported.input_name(node)]
        self.values[node] = _Value(Ref(port.name), Fact(port.shape, _counts(port, self.inputs)), port.rows)

    def _add_call(self, node: fx.Node) -> None:
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._add_python_call(node)
        where = source_line(node)
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat):
            return None  # a number: its reader judges it
        name = functional_name(node)
        call = bag_call(node)
        if call is not None and not isinstance(self._read(call.ids), torch.Tensor):
            return self._add_lookup(node, call)
        arguments, given = self._bound(node, where)
        if not _varies(arguments):
            self.values[node] = self._fold(node, arguments, where)
            return None
        if isinstance(node.meta.get("val"), tuple | list):
            self.values[node] = None  # its parts are asked for one by one
            return None
        self._emit(node, Lowered(name, arguments, given), where)
        return None

    def _add_python_call(self, node: fx.Node) -> None:
        """Handle getitem on a list of tensors; any other call makes a number, which its reader checks."""
        parent = node.args[0] if node.args else None
        if node.target is not getitem or not isinstance(parent, fx.Node):
            return
        made = self._read(parent)
        if isinstance(made, tuple | list):
            self.values[node] = made[int(node.args[1])]  # type: ignore[arg-type]
        elif isinstance(made, _Value) and node.args[1] == 0:  # an embedding bag: its first result is the pooled rows
            self.values[node] = made
        else:
            where = source_line(parent)
            arguments, _ = self._bound(parent, where)
            self._emit(node, lower_part(parent, int(node.args[1]), arguments, where), where)  # type: ignore[arg-type]

    def _emit(self, node: fx.Node, lowered: Lowered, where: str) -> None:
        shape = self.exported.shape(node, lowered.op, where)
        operator = VOCABULARY.get(lowered.op)
        if operator is None:
            raise UnsupportedOperator(lowered.op, why_unknown(lowered.op), where)
        facts = {key: _as_fact(value) for key, value in lowered.arguments.items()}
        try:
            counts = operator.rule(OperatorCall(facts, shape))
        except MixesRows as mixes:
            raise UnsupportedOperator(lowered.op, str(mixes), where) from mixes
        if (counts is not None) != (shape[:1] == (ROWS,)) or ROWS in shape[1:]:
            raise UnsupportedOperator(lowered.op, f"it fixes the number of rows: its result is {shape}", where)
        rows = _side(lowered.arguments)
        name = self._name(node.name)
        args, kwargs = self._arguments(lowered, shape)
        made = Node(
            name=name, op=lowered.op, args=args, kwargs=kwargs, shape=shape, dtype=_dtype(node.meta["val"]), rows=rows
        )
        self.nodes.append(made)
        self.values[node] = _Value(Ref(name), Fact(shape, counts), rows)

    def _add_lookup(self, node: fx.Node, call: BagCall) -> None:
        where = source_line(node)
        weight = self.values.get(call.table)
        ids = self._read(call.ids)
        if not isinstance(weight, torch.Tensor) or not isinstance(ids, _Value):
            raise UnsupportedOperator(call.op, "its table is not a parameter of the module", where)
        call.check_table(weight, where)
        offsets = self._offsets(call, ids, where)
        weights = self._read(call.weights) if call.weights is not None else None
        if isinstance(weights, torch.Tensor) or (weights is not None and weights.fact.counts != ids.fact.counts):
            raise UnsupportedOperator(call.op, "per_sample_weights must be computed from the bag's own ids", where)
        table = self.names[id(weight)].removesuffix(".weight")
        self.tables[table] = weight
        pooled = call.mode != "rows"
        shape = ((ROWS,) if pooled else ids.fact.shape) + (weight.shape[1],)
        name = self._name(table)
        args: tuple[Arg, ...] = (ids.ref, offsets, weights.ref if weights is not None else None)
        kwargs: dict[str, Arg] = {"table": table, "mode": call.mode}
        self.nodes.append(Node(name=name, op=LOOKUP, args=args, kwargs=kwargs, shape=shape, rows=ids.rows))
        self.values[node] = _Value(Ref(name), Fact(shape, PER_ROW if pooled else ids.fact.counts), ids.rows)

    def _offsets(self, call: BagCall, ids: _Value, where: str) -> Ref | None:
        """Return the bag's own offsets, or None for ids in equal rows or ids that are not pooled."""
        if call.mode == "rows" or call.equal_rows:
            if ids.fact.counts is None or (call.mode != "rows" and ids.fact.ndim != 2):
                raise UnsupportedOperator(call.op, "its ids must have one row per candidate", where)
            return None
        value = self._read(call.offsets) if call.offsets is not None else None
        kind, _, bag = (ids.fact.counts or "").partition(":")
        wanted = f"{'offsets' if call.include_last else 'starts'}:{bag}"
        if kind != "ids" or not isinstance(value, _Value) or value.fact.counts != wanted:
            how = "as they are (include_last_offset=True) or without the last (offsets[:-1])"
            raise UnsupportedOperator(call.op, f"a bag must be looked up with its own offsets, {how}", where)
        return Ref(bag + OFFSETS)

    def _fold(self, node: fx.Node, arguments: Mapping[str, Any], where: str) -> Any:
        """Compute now what depends on parameters alone."""
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise UnsupportedOperator(str(target), "it is random", where)
        if any(isinstance(value, _Unknown) for value in _leaves(arguments)):
            raise UnsupportedOperator(str(target), "it uses a number that depends on the request", where)
        if target._schema.is_mutable:
            name = functional_name(node)
            if name not in VOCABULARY:
                raise UnsupportedOperator(str(target), why_unknown(name), where)
            target = overload(name)
        args = fx.map_arg(node.args, self._read)
        kwargs = fx.map_arg(node.kwargs, self._read)
        made = target(*args, **kwargs)
        if not isinstance(made, tuple | list):
            return self._named(made, node.name)
        return [self._named(part, node.name) for part in made]

    def _named(self, made: Any, wanted: str) -> Any:
        """Add a constant of our own, laid out as it will be after it has been stored and read back."""
        if isinstance(made, torch.Tensor):
            made = made.contiguous()
            self.names.setdefault(id(made), self._name(wanted))
        return made

    def _read(self, node: fx.Node) -> Any:
        value = self.values.get(node)
        if isinstance(value, UnsupportedOperator):
            raise value.with_traceback(None)
        return value

    def _bound(self, node: fx.Node, where: str) -> tuple[dict[str, Any], frozenset[str]]:
        bound, given = bind(node)
        return {name: self._argument(value, where) for name, value in bound.items()}, given

    def _argument(self, value: Any, where: str) -> Any:
        """Return an argument of the trace with its nodes replaced by `_Value`, tensors and `RowCount`."""
        if isinstance(value, fx.Node):
            traced = value.meta.get("val")
            if isinstance(traced, torch.SymInt | torch.SymFloat | torch.SymBool):
                return RowCount() if self.exported.is_row_count(traced) else _Unknown(str(traced))
            return self._read(value)
        if isinstance(value, torch.SymInt):
            return RowCount() if self.exported.is_row_count(value) else _Unknown(str(value))
        if isinstance(value, tuple | list):
            return tuple(self._argument(part, where) for part in value)
        return value

    def _arguments(self, lowered: Lowered, shape: tuple[int, ...]) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
        """Return the arguments in the form that a program holds."""
        anchor = next(
            (v.ref for v in _leaves(lowered.arguments) if isinstance(v, _Value) and v.fact.counts == PER_ROW), None
        )
        for value in lowered.arguments.values():
            if isinstance(value, RowCount):  # in a list it is a size
                raise UnsupportedOperator(lowered.op, "it uses the number of rows as a number")
        plain = {key: self._plain(value, anchor, lowered.op) for key, value in lowered.arguments.items()}
        return lowered.arrange(plain, shape)

    def _plain(self, value: Any, anchor: Ref | None, op: str) -> Any:
        if isinstance(value, _Value):
            return value.ref
        if isinstance(value, RowCount):
            return self._row_count(anchor or Ref(USER_OF))
        if isinstance(value, _Unknown):
            raise UnsupportedOperator(op, f"it uses a number that depends on the request ({value.text})")
        if isinstance(value, torch.Tensor):
            name = self.names[id(value)]
            self.constants[name] = value
            return Ref(name)
        if isinstance(value, tuple | list):
            return tuple(self._plain(part, anchor, op) for part in value)
        return value

    def _row_count(self, of: Ref) -> Ref:
        name = f"{of.name}:rows"
        if not any(node.name == name for node in self.nodes):
            self.nodes.append(Node(name=name, op=SIZE, args=(of, 0), dtype="int"))
        return Ref(name)

    def _name(self, wanted: str) -> str:
        """Return `wanted`, with a number appended if the name is taken."""
        self.taken[wanted] = self.taken.get(wanted, 0) + 1
        return wanted if self.taken[wanted] == 1 else self._name(f"{wanted}_{self.taken[wanted]}")


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A number that depends on the request other than through its number of rows."""

    text: str


def _counts(port: Port, inputs: Sequence[Input]) -> str:
    for item in inputs:
        if isinstance(item, Bag) and port.name in (item.name, item.name + OFFSETS):
            return f"{'ids' if port.name == item.name else 'offsets'}:{item.name}"
    return PER_ROW


def _leaves(arguments: Any) -> list[Any]:
    values = arguments.values() if isinstance(arguments, Mapping) else arguments
    found: list[Any] = []
    for value in values:
        found += _leaves(value) if isinstance(value, tuple | list) else [value]
    return found


def _varies(arguments: Mapping[str, Any]) -> bool:
    """Return whether the result depends on the request, in its values or only in its size."""
    return any(isinstance(value, _Value | RowCount) for value in _leaves(arguments))


def _as_fact(value: Any) -> Any:
    if isinstance(value, _Value):
        return value.fact
    if isinstance(value, torch.Tensor):
        return Fact(tuple(value.shape))
    if isinstance(value, tuple | list):
        return tuple(_as_fact(part) for part in value)
    return value


def _side(arguments: Mapping[str, Any]) -> Rows:
    sides = {value.rows for value in _leaves(arguments) if isinstance(value, _Value)} - {"none"}
    return "item" if "item" in sides else "user" if sides else "none"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
