"""Values that are made of constants and the number of rows alone, computed for some number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from plait_disagg.graph.operators import SIZE, overload
from plait_disagg.graph.program import LOOKUP, DType, Node, Ref

__all__ = ["run_nodes"]


def run_nodes(
    nodes: Sequence[Node], constants: Mapping[str, torch.Tensor], wanted: Ref, *, rows: int
) -> torch.Tensor | None:
    """Return the value of `wanted` for `rows` rows; None if it depends on a request or on a table."""
    known = {node.name: node for node in nodes}
    values: dict[str, Any] = dict(constants)

    def value(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(value(part) for part in argument)
        if isinstance(argument, DType):
            return getattr(torch, argument.name)
        if not isinstance(argument, Ref):
            return argument
        if argument.name not in values:
            node = known[argument.name]
            if node.op == SIZE:
                values[argument.name] = rows
            elif node.op == LOOKUP or node.rows != "none":
                raise _Depends
            else:
                kwargs = {key: value(part) for key, part in node.kwargs.items()}
                values[argument.name] = overload(node.op)(*value(node.args), **kwargs)
        return values[argument.name]

    try:
        made: torch.Tensor = value(wanted)
    except _Depends:
        return None
    return made


class _Depends(Exception):
    """A value depends on the request."""
