"""From a module to a program: `torch.export` traces it, and every operator is checked before it is accepted.

ATen overloads stay as the module called them (nothing is decomposed), so a program reproduces the module bit for
bit. On the way, embedding operators become `plait.lookup`; whatever depends on parameters alone is computed once and
becomes a constant; in-place operators on values that nothing else reads become their functional equivalents;
`split`, `chunk` and `unbind` become slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from plait_disagg.graph.bags import BagCall, bag_call
from plait_disagg.graph.edit import lookups_of, simplify
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.exported import Exported, export
from plait_disagg.graph.fold import fold
from plait_disagg.graph.inputs import OFFSETS, Bag, Input, check_inputs, ports_of
from plait_disagg.graph.lower import Lowered, bind, functional_name, lower_part, why_unknown
from plait_disagg.graph.moved import MAKERS, Mover
from plait_disagg.graph.operators import SIZE, VOCABULARY, overload
from plait_disagg.graph.program import LOOKUP, ROWS, USER_OF, Arg, Node, Port, Program, Ref
from plait_disagg.graph.rows import PER_ROW, Fact, MixesRows, OperatorCall, RowCount
from plait_disagg.graph.source import module_hint, source_line
from plait_disagg.graph.traced import Layout, Traced, Unknown, as_fact, leaves, side_of, varies
from plait_disagg.tables.values import Lookup

__all__ = ["Captured", "capture", "obstacles"]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A module as a program.

    `constants` (by `Port` name) and `tables` (by `Lookup.table`) are the module's own tensors. `keeps_bits`: no
    operator was rewritten (`moved`), so that the program's results are the module's, bit for bit.
    """

    program: Program
    constants: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]
    lookups: tuple[Lookup, ...]
    inputs: tuple[Input, ...]
    keeps_bits: bool = True


def capture(module: nn.Module, inputs: Sequence[Input]) -> Captured:
    """Capture the module's `forward` (in evaluation mode, called with the tensors of `inputs` by name) as a program.

    Every input and every output has one row per candidate. Raises `UnsupportedOperator`, or ValueError for an
    invalid declaration. The module is not changed.
    """
    return _built(module, inputs, lenient=False).finish(inputs)


def obstacles(module: nn.Module, inputs: Sequence[Input]) -> tuple[UnsupportedOperator, ...]:
    """Return everything for which `capture` would refuse the module, in the order of its operators; each once.

    What comes behind a refused operator is judged as if that kept rows apart. Raises ValueError for an invalid
    declaration.
    """
    try:
        builder = _built(module, inputs, lenient=True)
    except UnsupportedOperator as refused:  # the trace itself
        return (refused,)
    try:
        builder.finish(inputs)
    except UnsupportedOperator as refused:
        builder.met.append(refused)
    ordered = [refused for refused in builder.refusals if refused in builder.met]
    ordered += [refused for refused in builder.met if refused not in builder.refusals]
    return tuple({str(refused): refused for refused in ordered}.values())


def _built(module: nn.Module, inputs: Sequence[Input], *, lenient: bool) -> _Builder:
    check_inputs(inputs)
    if module.training:
        raise UnsupportedOperator(type(module).__name__, "it is in training mode: call module.eval() first")
    exported = export(module, inputs)
    builder = _Builder(exported, inputs, lenient)
    with torch.no_grad():
        for node in exported.live_nodes():
            builder.add(node)
    return builder


@dataclass
class _Builder:
    exported: Exported
    inputs: Sequence[Input]
    lenient: bool = False  # go on behind what is refused
    met: list[UnsupportedOperator] = field(default_factory=list)
    values: dict[fx.Node, Any] = field(default_factory=dict)  # Traced, a constant tensor (or tuple of them), a number
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # id of a constant tensor to its name
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

    def finish(self, inputs: Sequence[Input]) -> Captured:
        """Return the program, with its outputs named."""
        outputs = []
        for name, node in self.exported.outputs():
            value = self._read(node) if node is not None else None
            if not isinstance(value, Traced) or value.fact.counts != PER_ROW or not value.layout.is_plain:
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
        program, constants = fold(simplify(program), constants)
        return Captured(
            program=program,
            constants=constants,
            tables=self.tables,
            lookups=lookups_of(program),
            inputs=tuple(inputs),
            keeps_bits=not self.moved,
        )

    def _add_placeholder(self, node: fx.Node) -> None:
        tensor = self.exported.constant(node)
        if tensor is not None:
            name, found = tensor
            self.values[node] = found
            self.names.setdefault(id(found), self.name(name))
            return
        port = self.ports[self.exported.input_name(node)]
        fact = Fact(port.shape, _counts(port, self.inputs))
        self.values[node] = Traced(Ref(port.name), fact, port.rows, port.dtype, Layout(port.shape))

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
        if not varies(arguments):
            self.values[node] = self._fold(node, arguments, where)
            return None
        if isinstance(node.meta.get("val"), tuple | list):
            self.values[node] = None  # its parts are asked for one by one
            return None
        self.values[node] = self._emit(node, Lowered(name, arguments, given), where)
        return None

    def _add_python_call(self, node: fx.Node) -> None:
        """Handle getitem on a list of tensors; any other call makes a number, which its reader checks."""
        parent = node.args[0] if node.args else None
        if node.target is not getitem or not isinstance(parent, fx.Node):
            return
        made = self._read(parent)
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
        appender = _Appender(self, node.name, where)
        refused = None
        expanded = lowered.op == "aten.expand_as.default" and isinstance(lowered.arguments["self"], torch.Tensor)
        fresh = expanded or lowered.op in MAKERS  # made for as many rows as its reader has
        if plain and not fresh:
            shape = self.exported.shape(node, lowered.op, where)
            try:
                return appender.append(
                    lowered.op, lowered.arguments, lowered.given, Layout(shape), _dtype(node.meta["val"])
                )
            except UnsupportedOperator as error:
                refused = error
        try:
            if out is None:
                raise MixesRows("its result does not have the rows in one dimension: rows meet rows, or are lost")
            made = Mover(appender).lower(lowered.op, lowered.arguments, lowered.given, *out, _dtype(node.meta["val"]))
        except (MixesRows, UnsupportedOperator) as error:
            if refused is not None:
                raise refused from error
            if isinstance(error, UnsupportedOperator):
                raise
            known = lowered.op in VOCABULARY
            raise UnsupportedOperator(lowered.op, str(error) if known else why_unknown(lowered.op), where) from error
        self.moved = self.moved or not fresh
        return made

    def _add_lookup(self, node: fx.Node, call: BagCall) -> None:
        where = source_line(node)
        weight = self.values.get(call.table)
        ids = self._read(call.ids)
        if not isinstance(weight, torch.Tensor) or not isinstance(ids, Traced):
            raise UnsupportedOperator(call.op, "its table is not a parameter of the module", where)
        call.check_table(weight, where)
        if call.mode == "rows" and self._same_for_all(ids):
            return self._add_constant_rows(node, ids, weight, where)
        offsets = self._offsets(call, ids, where)
        weights = self._read(call.weights) if call.weights is not None else None
        if isinstance(weights, torch.Tensor) or (weights is not None and weights.fact.counts != ids.fact.counts):
            raise UnsupportedOperator(call.op, "per_sample_weights must be computed from the bag's own ids", where)
        table = self.names[id(weight)].removesuffix(".weight")
        self.tables[table] = weight
        pooled = call.mode != "rows"
        shape = ((ROWS,) if pooled else ids.fact.shape) + (weight.shape[1],)
        name = self.name(table)
        args: tuple[Arg, ...] = (ids.ref, offsets, weights.ref if weights is not None else None)
        kwargs: dict[str, Arg] = {"table": table, "mode": call.mode}
        self.nodes.append(Node(name=name, op=LOOKUP, args=args, kwargs=kwargs, shape=shape, rows=ids.rows))
        fact = Fact(shape, PER_ROW if pooled else ids.fact.counts)
        layout = Layout(shape) if pooled else replace(ids.layout, sizes=(*ids.layout.sizes, weight.shape[1]))
        self.values[node] = Traced(Ref(name), fact, ids.rows, "float32", layout)

    def _same_for_all(self, ids: Traced) -> bool:
        """Return whether ids are a constant that was expanded over the rows, such as positions."""
        made = next((node for node in self.nodes if node.name == ids.ref.name), None)
        source = made.args[0] if made is not None and made.op == "aten.expand.default" else None
        return ids.layout.is_plain and isinstance(source, Ref) and source.name in self.constants

    def _add_constant_rows(self, node: fx.Node, ids: Traced, weight: torch.Tensor, where: str) -> None:
        """Look up now what is the same for all rows, and expand that: a constant, which no request has to send."""
        made = next(made for made in self.nodes if made.name == ids.ref.name)
        source = made.args[0]
        assert isinstance(source, Ref)
        held = self.constants[source.name]
        rows = self.named(weight[held.reshape((1,) * (ids.layout.ndim - held.dim()) + held.shape)], node.name)
        shape = (*ids.layout.sizes, int(weight.shape[1]))
        given = {"self": rows, "size": (RowCount(), *shape[1:])}
        appender = _Appender(self, node.name, where)
        self.values[node] = appender.append(
            "aten.expand.default", given, frozenset(given), Layout(shape), _dtype(weight)
        )

    def _offsets(self, call: BagCall, ids: Traced, where: str) -> Ref | None:
        """Return the bag's own offsets, or None for ids in equal rows or ids that are not pooled."""
        if call.mode == "rows" or call.equal_rows:
            if not ids.layout.is_plain and call.mode != "rows":
                raise UnsupportedOperator(call.op, "its ids must have one row per candidate", where)
            if ids.fact.counts is None or (call.mode != "rows" and ids.fact.ndim != 2):
                raise UnsupportedOperator(call.op, "its ids must have one row per candidate", where)
            return None
        value = self._read(call.offsets) if call.offsets is not None else None
        kind, _, bag = (ids.fact.counts or "").partition(":")
        wanted = f"{'offsets' if call.include_last else 'starts'}:{bag}"
        if kind != "ids" or not isinstance(value, Traced) or value.fact.counts != wanted:
            how = "as they are (include_last_offset=True) or without the last (offsets[:-1])"
            raise UnsupportedOperator(call.op, f"a bag must be looked up with its own offsets, {how}", where)
        return Ref(bag + OFFSETS)

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
        args = fx.map_arg(node.args, self._read)
        kwargs = fx.map_arg(node.kwargs, self._read)
        made = target(*args, **kwargs)
        if not isinstance(made, tuple | list):
            return self.named(made, node.name)
        return [self.named(part, node.name) for part in made]

    def named(self, made: Any, wanted: str) -> Any:
        """Add a constant of our own, laid out as it will be after it has been stored and read back."""
        if isinstance(made, torch.Tensor):
            made = made.contiguous()
            self.names.setdefault(id(made), self.name(wanted))
        return made

    def _read(self, node: fx.Node) -> Any:
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
        return Traced(Ref(USER_OF), Fact(layout.stored, PER_ROW), "item", _dtype(node.meta["val"]), layout)

    def _bound(self, node: fx.Node, where: str) -> tuple[dict[str, Any], frozenset[str]]:
        bound, given = bind(node)
        return {name: self._argument(value, where) for name, value in bound.items()}, given

    def _argument(self, value: Any, where: str) -> Any:
        """Return an argument of the trace with its nodes replaced by `Traced`, tensors and `RowCount`."""
        if isinstance(value, fx.Node):
            traced = value.meta.get("val")
            if isinstance(traced, torch.SymInt | torch.SymFloat | torch.SymBool):
                return RowCount() if self.exported.is_row_count(traced) else Unknown(str(traced))
            return self._read(value)
        if isinstance(value, torch.SymInt):
            return RowCount() if self.exported.is_row_count(value) else Unknown(str(value))
        if isinstance(value, tuple | list):
            return tuple(self._argument(part, where) for part in value)
        return value

    def program_arguments(self, lowered: Lowered, shape: tuple[int, ...]) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
        """Return the arguments in the form that a program holds."""
        anchor = next(
            (v.ref for v in leaves(lowered.arguments) if isinstance(v, Traced) and v.fact.counts == PER_ROW), None
        )
        for value in lowered.arguments.values():
            if isinstance(value, RowCount):  # in a list it is a size
                raise UnsupportedOperator(lowered.op, "it uses the number of rows as a number")
        plain = {key: self._plain(value, anchor, lowered.op) for key, value in lowered.arguments.items()}
        return lowered.arrange(plain, shape)

    def _plain(self, value: Any, anchor: Ref | None, op: str) -> Any:
        if isinstance(value, Traced):
            return value.ref
        if isinstance(value, RowCount):
            return self._row_count(anchor or Ref(USER_OF))
        if isinstance(value, Unknown):
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

    def name(self, wanted: str) -> str:
        """Return `wanted`, with a number appended if the name is taken."""
        self.taken[wanted] = self.taken.get(wanted, 0) + 1
        return wanted if self.taken[wanted] == 1 else self.name(f"{wanted}_{self.taken[wanted]}")


@dataclass(frozen=True, slots=True)
class _Appender:
    """Adds the calls that one traced operator becomes. Each is checked by the rule of its operator."""

    builder: _Builder
    wanted: str
    where: str

    def append(
        self, op: str, arguments: Mapping[str, Any], given: frozenset[str], layout: Layout, dtype: str
    ) -> Traced:
        """Add one call; see `moved.Emitter`."""
        operator = VOCABULARY.get(op)
        if operator is None:
            raise UnsupportedOperator(op, why_unknown(op), self.where)
        facts = {key: as_fact(value) for key, value in arguments.items()}
        shape = layout.stored
        try:
            counts = operator.rule(OperatorCall(facts, shape))
        except MixesRows as mixes:
            raise UnsupportedOperator(op, str(mixes), self.where) from mixes
        if (counts is not None) != (shape[:1] == (ROWS,)) or ROWS in shape[1:]:
            raise UnsupportedOperator(op, f"it fixes the number of rows: its result is {shape}", self.where)
        rows = side_of(arguments)
        args, kwargs = self.builder.program_arguments(Lowered(op, arguments, given), shape)
        name = self.builder.name(self.wanted)
        self.builder.nodes.append(Node(name=name, op=op, args=args, kwargs=kwargs, shape=shape, dtype=dtype, rows=rows))
        return Traced(Ref(name), Fact(shape, counts), rows, dtype, layout)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a constant; see `moved.Emitter`."""
        made: torch.Tensor = self.builder.named(tensor, self.wanted)
        return made


def _counts(port: Port, inputs: Sequence[Input]) -> str:
    for item in inputs:
        if isinstance(item, Bag) and port.name in (item.name, item.name + OFFSETS):
            return f"{'ids' if port.name == item.name else 'offsets'}:{item.name}"
    return PER_ROW


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
