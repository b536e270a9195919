"""Adds calls to a program in the making, each checked by the rule of its operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from plait_disagg.graph.capture.lower import Lowered, why_unknown
from plait_disagg.graph.capture.traced import RowsLayout, Traced, as_fact, side_of
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.operators import VOCABULARY, overload
from plait_disagg.graph.program import ROWS, Arg, Node, Ref
from plait_disagg.graph.rows import Fact, MixesRows, OperatorCall

__all__ = ["Appender", "Making"]


class Making(Protocol):
    """What a program in the making offers."""

    nodes: list[Node]

    def name(self, wanted: str) -> str:
        """Return a free name."""

    def named(self, made: Any, wanted: str) -> Any:
        """Return a tensor as a constant of the program."""

    def program_arguments(self, lowered: Lowered, shape: tuple[int, ...]) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
        """Return arguments in the form that a program holds."""


@dataclass(frozen=True, slots=True)
class Appender:
    """Adds the calls that one traced operator becomes. Each is checked by the rule of its operator."""

    builder: Making
    wanted: str
    where: str

    def append(
        self, op: str, arguments: Mapping[str, Any], given: frozenset[str], layout: RowsLayout, dtype: str
    ) -> Traced:
        """Add one call; see `rows_first.Emitter`."""
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
        """Add a constant; see `rows_first.Emitter`."""
        made: torch.Tensor = self.builder.named(tensor, self.wanted)
        return made
