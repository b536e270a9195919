"""The naive counterpart of `execute.py`: one operator after the other. It can also be observed, which is how costs are
measured; and a value made of constants and the number of rows alone can be computed without a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from plait_disagg.graph.operators import SIZE, overload
from plait_disagg.graph.program import LOOKUP, TILE, DType, Node, Program, Ref
from plait_disagg.tables.protocols import LookupRequest, Tables
from plait_disagg.tables.values import Lookup

Watch: TypeAlias = "Callable[[Node, Callable[[], Any]], Any]"
"""Receives a node and the function that computes it; returns the node's value."""


def run_reference(
    program: Program,
    constants: Mapping[str, torch.Tensor],
    tables: Tables | None,
    tensors: Mapping[str, torch.Tensor],
    watch: Watch = lambda _, compute: compute(),
) -> dict[str, torch.Tensor]:
    """Return every value of the program by name, inputs and numbers included. `tensors`: its inputs."""
    values: dict[str, Any] = {name: tensors[name] for name in (port.name for port in program.inputs)}
    values |= {port.name: constants[port.name].detach() for port in program.constants}
    with torch.inference_mode():
        for node in program.nodes:
            args = _resolved(node.args, values)
            kwargs = {key: _resolved(value, values) for key, value in node.kwargs.items()}
            values[node.name] = watch(node, _computation(node, args, kwargs, tables))
    return values


def _computation(node: Node, args: Any, kwargs: dict[str, Any], tables: Tables | None) -> Callable[[], Any]:
    if node.op == LOOKUP:
        assert tables is not None
        ask = _ask(node.name, args, kwargs)
        return lambda: tables.lookup([ask])[0]
    if node.op == TILE:
        return lambda: args[0][args[1]]
    if node.op == SIZE:
        return lambda: args[0].shape[0]
    operator = overload(node.op)
    return lambda: operator(*args, **kwargs)


def _ask(name: str, args: Any, kwargs: dict[str, Any]) -> LookupRequest:
    ids, offsets, weights = args
    if kwargs["mode"] != "rows" and offsets is None:
        offsets = torch.arange(ids.shape[0] + 1) * ids.shape[1]
        ids, weights = ids.flatten(), None if weights is None else weights.flatten()
    lookup = Lookup(name=name, table=kwargs["table"], mode=kwargs["mode"])
    return LookupRequest(lookup=lookup, ids=ids, offsets=offsets, weights=weights)


def _resolved(argument: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, DType):
        return getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return tuple(_resolved(part, values) for part in argument)
    return argument


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
                raise _DependsOnRequest
            else:
                kwargs = {key: value(part) for key, part in node.kwargs.items()}
                values[argument.name] = overload(node.op)(*value(node.args), **kwargs)
        return values[argument.name]

    try:
        made: torch.Tensor = value(wanted)
    except _DependsOnRequest:
        return None
    return made


class _DependsOnRequest(Exception):
    """A value depends on the request."""
