"""From a module to a program: `torch.export` traces it, and every operator is checked before it is accepted.

ATen overloads stay as the module called them (nothing is decomposed), so a program reproduces the module bit for
bit. On the way, embedding operators become `plait.lookup`; whatever depends on parameters alone is computed once and
becomes a constant; in-place operators on values that nothing else reads become their functional equivalents;
`split`, `chunk` and `unbind` become slices.

    exported     from a module and its inputs        to a trace: nodes, each with its line in the model
    decomposed   from a trace                        to one whose operators a program can hold, as far as possible
    calls        from a node                         to a call by names: functional, of one tensor
    rows_first   from a call with rows elsewhere     to calls with the rows in front
    draft        from calls                          to nodes of a program, each checked by the rule of its operator
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from plait_disagg.graph.capture.calls import (
    Call,
    bag_call,
    bind,
    functional_name,
    part_of,
    placed_anywhere,
    why_unknown,
)
from plait_disagg.graph.capture.draft import (
    RowsLayout,
    Traced,
    TracedDraft,
    Unknown,
    add_lookup,
    dtype_of,
    traced_in,
)
from plait_disagg.graph.capture.exported import Exported, block_line, export, module_hint, source_line
from plait_disagg.graph.capture.rows_first import MAKERS, MovedCall, Mover
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.fold import fold
from plait_disagg.graph.inputs import OFFSETS, Bag, Input, check_inputs, ports_of, tensor_names
from plait_disagg.graph.operators import VOCABULARY, overload
from plait_disagg.graph.program import LOOKUP, ROWS, USER_OF, Program, Ref
from plait_disagg.graph.rows import PER_ROW, Fact, MixesRows, RowCount

__all__ = ["Captured", "capture", "obstacles"]

_WITH = "operators in a `with` of torch.autocast or torch.enable_grad are not read: leave it out, cast with .to(dtype)"


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A module as a program.

    `constants` (by `Port` name) and `tables` (by name) are the module's own tensors. `keeps_bits`: no
    operator was rewritten (`rows_first`), so that the program's results are the module's, bit for bit.
    """

    program: Program
    constants: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]
    inputs: tuple[Input, ...]
    keeps_bits: bool = True


def capture(module: nn.Module, inputs: Sequence[Input]) -> Captured:
    """Capture the module's `forward` (in evaluation mode, called with the tensors of `inputs` by name) as a program.

    Every input and every output has one row per candidate. Raises `UnsupportedOperator`, or ValueError for an
    invalid declaration. The module is not changed.
    """
    return _Capture(module, inputs).captured()


def obstacles(module: nn.Module, inputs: Sequence[Input]) -> tuple[UnsupportedOperator, ...]:
    """Return everything for which `capture` would refuse the module, in the order of its operators; each once.

    What comes behind a refused operator is judged as if that kept rows apart. Raises ValueError for an invalid
    declaration.
    """
    try:
        work = _Capture(module, inputs, lenient=True)
    except UnsupportedOperator as refused:  # the trace itself
        return (refused,)
    return work.obstacles()


class _Capture:
    """Builds a program from the nodes of a trace, one after the other.

    `_values` holds what each node of the trace became: a `Traced`, a constant tensor (or a list of them), a refusal
    that is raised when it is read, or None.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Input], *, lenient: bool = False) -> None:
        """Trace the module and add its operators. `lenient`: go on behind what is refused."""
        check_inputs(inputs)
        if module.training:
            raise UnsupportedOperator(type(module).__name__, "it is in training mode: call module.eval() first")
        self._exported: Exported = export(module, inputs)
        self._inputs = tuple(inputs)
        self._lenient = lenient
        self._draft = TracedDraft(ports_of(inputs))
        self._values: dict[fx.Node, Any] = {}
        self._refusals: list[UnsupportedOperator] = []
        self._met: list[UnsupportedOperator] = []
        with torch.no_grad():
            for node in self._exported.live_nodes():
                self._add(node)

    def captured(self) -> Captured:
        """Return the program, with its outputs named."""
        outputs = []
        for name, node in self._exported.outputs().items():
            value = self._read(node) if node is not None else None
            if not isinstance(value, Traced) or value.fact.counts != PER_ROW or not value.layout.is_plain:
                raise UnsupportedOperator("output", f"{name} does not have one row per candidate")
            outputs.append((name, value.ref))
        program, constants = self._draft.finished(tuple(outputs))
        program, constants = fold(program, constants, self._draft.tables)
        read = {str(node.kwargs["table"]) for node in program.nodes if node.op == LOOKUP}
        return Captured(
            program=program,
            constants=constants,
            tables={name: table for name, table in self._draft.tables.items() if name in read},
            inputs=self._inputs,
            keeps_bits=self._draft.keeps_bits,
        )

    def obstacles(self) -> tuple[UnsupportedOperator, ...]:
        """Return what was refused and read, in the order of the operators."""
        try:
            self.captured()
        except UnsupportedOperator as refused:
            self._met.append(refused)
        ordered = [refused for refused in self._refusals if refused in self._met]
        ordered += [refused for refused in self._met if refused not in self._refusals]
        return tuple({str(refused): refused for refused in ordered}.values())

    def _add(self, node: fx.Node) -> None:
        self._draft.wanted = node.name
        if node.op in ("placeholder", "call_function"):
            try:
                self._values[node] = self._placeholder(node) if node.op == "placeholder" else self._called(node)
            except UnsupportedOperator as refused:  # raised when it is read: what flattens a bag of equal rows is not
                self._values[node] = self._refused(refused, node)
        elif node.op == "get_attr":
            raise UnsupportedOperator(str(next(iter(node.users)).target), _WITH, block_line(node))

    def _refused(self, refused: UnsupportedOperator, node: fx.Node) -> UnsupportedOperator:
        """Return the refusal for the author of the model. One that was only read again stays as it is."""
        if refused in self._refusals:
            return refused
        made = UnsupportedOperator(refused.operator, refused.why + module_hint(node), source_line(node))
        self._refusals.append(made)
        return made

    def _placeholder(self, node: fx.Node) -> Traced | torch.Tensor:
        tensor = self._exported.constant(node)
        if tensor is not None:
            name, found = tensor
            return self._draft.hold(found, name)
        name = self._exported.inputs[node.name]
        port, counts = next(port for port in ports_of(self._inputs) if port.name == name), PER_ROW
        for item in self._inputs:
            if isinstance(item, Bag) and name in tensor_names((item,)):
                counts = f"{'offsets' if name == item.name + OFFSETS else 'ids'}:{item.name}"
        return Traced(Ref(name), Fact(port.shape, counts), port.rows, port.dtype, RowsLayout(port.shape))

    def _called(self, node: fx.Node) -> Any:
        """Return what a call becomes; None for a number and for several tensors, which their readers judge."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._python_call(node)
        made = node.meta.get("val")
        if isinstance(made, torch.SymInt | torch.SymBool | torch.SymFloat):
            return None
        name, lookup, picked = functional_name(node), bag_call(node), self._picked(node)
        if lookup is not None and not isinstance(self._read(lookup.ids), torch.Tensor):
            return add_lookup(lookup, self._values.get(lookup.table), self._read, self._draft)
        if picked is not None:
            return _gathered(self._read(picked[0]), self._read(picked[1]), self._draft)
        call = self._bound(node)
        if not any(isinstance(value, Traced | RowCount) for value in tree_leaves(dict(call.given))):
            return self._computed(node, call)
        if isinstance(made, tuple | list):
            return None
        return self._appended(node, placed_anywhere(node, Call(name, call.given)))

    def _python_call(self, node: fx.Node) -> Any:
        """Handle getitem on a list of tensors; any other call makes a number."""
        parent = node.args[0] if node.args else None
        if node.target is not getitem or not isinstance(parent, fx.Node):
            return None
        made, index = self._read(parent), int(node.args[1])  # type: ignore[arg-type]
        if isinstance(made, tuple | list):
            return made[index]
        if isinstance(made, Traced) and index == 0:  # an embedding bag: its first result is the pooled rows
            return made
        if not isinstance(parent.target, torch._ops.OpOverload):  # such as what orders checks
            raise UnsupportedOperator(str(parent.target), why_unknown(str(parent.target)))
        return self._appended(node, part_of(parent, index, self._bound(parent)))

    def _appended(self, node: fx.Node, call: Call) -> Traced:
        """Add a call, or what computes the same where the rows are not in front."""
        out, dtype = self._exported.layout(node, call.op), dtype_of(node.meta["val"])
        layouts = [value.layout for value in traced_in(call.given)]
        plain = all(layout.is_plain for layout in layouts) and (out is None or (out[0].at, out[1]) == (0, 1))
        refused = None
        expanded = call.op == "aten.expand_as.default" and isinstance(call.given["self"], torch.Tensor)
        fresh = expanded or call.op in MAKERS  # made for as many rows as its reader has
        if plain and not fresh:
            shape = self._exported.shape(node, call.op)
            try:
                return self._draft.call(call.op, RowsLayout(shape), dtype, **call.given)
            except UnsupportedOperator as error:
                refused = error
        try:
            if out is None:
                raise MixesRows("its result does not have the rows in one dimension: rows meet rows, or are lost")
            made = Mover(self._draft).lower(MovedCall(call.op, call.given, *out, dtype))
        except (MixesRows, UnsupportedOperator) as error:
            if refused is not None:
                raise refused from error
            if isinstance(error, UnsupportedOperator):
                raise
            why = str(error) if call.op in VOCABULARY else why_unknown(call.op)
            raise UnsupportedOperator(call.op, why) from error
        if not fresh:
            self._draft.keeps_bits = False
        return made

    def _computed(self, node: fx.Node, call: Call) -> Any:
        """Compute now what depends on parameters alone."""
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise UnsupportedOperator(str(target), "it is random")
        if any(isinstance(value, Unknown) for value in tree_leaves(dict(call.given))):
            raise UnsupportedOperator(str(target), "it uses a number that depends on the request")
        if target._schema.is_mutable:
            name = functional_name(node)
            if name not in VOCABULARY:
                raise UnsupportedOperator(str(target), why_unknown(name))
            target = overload(name)
        made = target(*fx.map_arg(node.args, self._read), **fx.map_arg(node.kwargs, self._read))
        parts = made if isinstance(made, tuple | list) else [made]
        found = [self._draft.computed(part) if isinstance(part, torch.Tensor) else part for part in parts]
        return found if isinstance(made, tuple | list) else found[0]

    def _read(self, node: fx.Node) -> Any:
        """Return what a node of the trace became. Raises `UnsupportedOperator` if that was refused."""
        value = self._values.get(node)
        if isinstance(value, UnsupportedOperator) and self._lenient:
            self._met.append(value)
            value = self._values[node] = self._assumed(node, value)
        if isinstance(value, UnsupportedOperator):
            raise value.with_traceback(None)
        return value

    def _assumed(self, node: fx.Node, refused: UnsupportedOperator) -> Any:
        """Return a value in place of one that was refused: of its shape, and with its rows apart."""
        try:
            out = self._exported.layout(node, refused.operator)
        except UnsupportedOperator:
            return refused
        if out is None:
            return refused
        layout = replace(out[0], after=out[1])
        return Traced(Ref(USER_OF), Fact(layout.stored, PER_ROW), "item", dtype_of(node.meta["val"]), layout)

    def _bound(self, node: fx.Node) -> Call:
        """Return a traced call on `Traced`, tensors and `RowCount`."""
        call = bind(node)
        return Call(call.op, {name: self._argument(value) for name, value in call.given.items()})

    def _argument(self, value: Any) -> Any:
        number = value.meta.get("val") if isinstance(value, fx.Node) else value
        if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
            return RowCount() if self._exported.is_row_count(number) else Unknown(str(number))
        if isinstance(value, fx.Node):
            return self._read(value)
        if isinstance(value, tuple | list):
            return tuple(self._argument(part) for part in value)
        return value

    def _picked(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Return source and steps of a call that picks a step of every row, or None for any other operator.

        It is `x[torch.arange(rows), steps]`, which libraries write to read the last step of a history.
        """
        given: Any = node.args
        if str(node.target) != "aten.index.Tensor" or len(given[1]) != 2:
            return None
        source, (row, step) = given
        places = {"aten.arange.default": 0, "aten.arange.start": 1, "aten.arange.start_step": 1}
        if not all(isinstance(one, fx.Node) for one in (source, row, step)) or str(row.target) not in places:
            return None
        others = list(row.args)
        end = others.pop(places[str(row.target)])
        starts = all(value == wanted for value, wanted in zip(others, (0, 1), strict=False))
        is_every_row = starts and isinstance(end, fx.Node) and self._exported.is_row_count(end.meta["val"])
        return (source, step) if is_every_row else None


def _gathered(values: Any, steps: Any, draft: TracedDraft) -> Traced:
    """Return each row's own step of (rows, steps, ...). A step below 0 counts from the end."""
    for one, ndim in ((values, None), (steps, 1)):
        whole = isinstance(one, Traced) and one.layout.is_plain and one.fact.counts == PER_ROW
        if not whole or (ndim or one.fact.ndim) != one.fact.ndim:
            raise UnsupportedOperator("aten.index.Tensor", "it picks among the rows")
    _, length, *behind = values.layout.sizes
    negative = draft.on(steps, "aten.lt.Scalar", "bool", other=0)
    from_end = draft.on(steps, "aten.add.Scalar", steps.dtype, other=length)
    counted = draft.on(negative, "aten.where.self", steps.dtype, self=from_end, other=steps)
    narrow, wide = (ROWS, 1, *(1 for _ in behind)), (ROWS, 1, *behind)
    index = draft.on(counted, "aten.reshape.default", steps.dtype, narrow, shape=narrow)
    if behind:
        index = draft.on(index, "aten.expand.default", steps.dtype, wide, size=wide)
    picked = draft.on(values, "aten.gather.default", values.dtype, wide, dim=1, index=index)
    return draft.on(picked, "aten.squeeze.dim", values.dtype, (ROWS, *behind), dim=1)
