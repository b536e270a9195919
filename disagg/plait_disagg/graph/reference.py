"""The naive counterpart of `execute.py`: one operator after the other. It can also be observed, which is how costs are
measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from plait_disagg.graph.edit import lookup_of, resolve
from plait_disagg.graph.execute import lookup_request
from plait_disagg.graph.operators import SIZE, overload
from plait_disagg.graph.program import LOOKUP, TILE, Node, Program
from plait_disagg.tables.protocols import Tables

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
            args, kwargs = resolve(node.args, values), resolve(dict(node.kwargs), values)
            values[node.name] = watch(node, _computation(node, args, kwargs, tables))
    return values


def _computation(node: Node, args: Any, kwargs: dict[str, Any], tables: Tables | None) -> Callable[[], Any]:
    if node.op == LOOKUP:
        assert tables is not None
        return lambda: tables.lookup([lookup_request(lookup_of(node), *args)])[0]
    if node.op == TILE:
        return lambda: args[0][args[1]]
    if node.op == SIZE:
        return lambda: args[0].shape[0]
    operator = overload(node.op)
    return lambda: operator(*args, **kwargs)
