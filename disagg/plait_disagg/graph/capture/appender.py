"""Adds calls to a program in the making, each checked by the rule of its operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from plait_disagg.graph.capture.lower import Lowered, why_unknown
from plait_disagg.graph.capture.traced import RowsLayout, Traced, Unknown, as_fact, leaves, side_of
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.operators import SIZE, VOCABULARY, overload
from plait_disagg.graph.program import ROWS, USER_OF, Arg, Node, Ref
from plait_disagg.graph.rows import PER_ROW, Fact, MixesRows, OperatorCall, RowCount


@dataclass(kw_only=True)
class ProgramParts:
    """The parts of a program in the making, and the names that are taken."""

    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # id of a constant tensor to its name

    def name(self, wanted: str) -> str:
        """Return `wanted`, with a number appended if the name is taken."""
        self.taken[wanted] = self.taken.get(wanted, 0) + 1
        return wanted if self.taken[wanted] == 1 else self.name(f"{wanted}_{self.taken[wanted]}")

    def named(self, made: Any, wanted: str) -> Any:
        """Add a constant of our own, laid out as it will be after it has been stored and read back."""
        if isinstance(made, torch.Tensor):
            made = made.contiguous()
            self.names.setdefault(id(made), self.name(wanted))
        return made

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


@dataclass(frozen=True, slots=True)
class Appender:
    """Adds the calls that one traced operator becomes. Each is checked by the rule of its operator."""

    builder: ProgramParts
    wanted: str
    where: str

    def append(
        self, op: str, arguments: Mapping[str, Any], given: frozenset[str], layout: RowsLayout, dtype: str
    ) -> Traced:
        """Add one call on the program's tensors; its result is stored as `layout` says. Raises
        `UnsupportedOperator`."""
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

    def call(
        self, op: str, source: Traced, makes: str, shape: tuple[int, ...] | None = None, /, **others: Any
    ) -> Traced:
        """Add one call on `source`, where rows are in front, with the rest of its arguments by name.

        `makes`, `shape`: dtype and shape of the result; a shape that is left out is the source's.
        """
        schema = overload(op)._schema  # type: ignore[attr-defined]
        given = {schema.arguments[0].name: source, **others}
        defaults = {argument.name: argument.default_value for argument in schema.arguments}
        layout = source.layout if shape is None else RowsLayout(shape)
        return self.append(op, {**defaults, **given}, frozenset(given), layout, makes)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a constant of the program with these numbers."""
        made: torch.Tensor = self.builder.named(tensor, self.wanted)
        return made
