"""Each row's own step: `x[torch.arange(rows), steps]`, which libraries write to read the last step of a history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.program import ROWS
from plait_disagg.graph.rows import PER_ROW
from plait_disagg.graph.trace.appender import Appender, Making
from plait_disagg.graph.trace.traced import Traced

__all__ = ["StepGather", "picked_by"]


class _Counting(Protocol):
    def is_row_count(self, number: Any) -> bool:
        """Return whether a symbolic number is the number of rows."""


class _PickMaking(Making, Protocol):
    def read(self, node: fx.Node) -> Any:
        """Return what a node of the trace became."""


def picked_by(node: fx.Node, counting: _Counting) -> tuple[fx.Node, fx.Node] | None:
    """Return source and steps of a call that picks a step of every row, or None for any other operator."""
    if str(node.target) != "aten.index.Tensor" or len(node.args[1]) != 2:  # type: ignore[arg-type]
        return None
    given: Any = node.args
    source, (row, step) = given
    if not all(isinstance(one, fx.Node) for one in (source, row, step)) or not _is_every_row(row, counting):
        return None
    return source, step


def _is_every_row(node: fx.Node, counting: _Counting) -> bool:
    """Return whether a value is 0, 1, ... up to the number of rows."""
    places = {"aten.arange.default": 0, "aten.arange.start": 1, "aten.arange.start_step": 1}
    place = places.get(str(node.target))
    if place is None:
        return False
    end: Any
    end, others = node.args[place], [node.args[index] for index in range(len(node.args)) if index != place]
    starts = all(value == wanted for value, wanted in zip(others, (0, 1), strict=False))
    return starts and isinstance(end, fx.Node) and counting.is_row_count(end.meta["val"])


@dataclass(frozen=True, slots=True)
class StepGather:
    """Adds the calls that one such pick becomes."""

    builder: _PickMaking
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
