"""Crossing tensors that are bare rows of a table: the CN program that leaves them out and makes their ids instead."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait_disagg.graph.edit import live
from plait_disagg.graph.program import LOOKUP, Node, Program, Ref

__all__ = ["CachedPort", "without_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPort:
    """A crossing output: `name` is the rows of `table` for the value `ids`, an input or a node of the CN program."""

    name: str
    table: str
    ids: str


def without_rows(program: Program) -> tuple[Program, tuple[CachedPort, ...]]:
    """Return the CN program without the lookups whose rows are only sent, and what it leaves out.

    The outputs keep their names and order; those of the ports are ids, as passed to the lookup: (..., ) integers
    that the table's out-of-range policy has not yet been applied to. Rows that the CN itself reads are unchanged.
    """
    read = {name for node in program.nodes for name in node.inputs}
    bare = {node.name: node for node in program.nodes if _is_rows(node) and node.name not in read}
    ports = tuple(_port(name, bare[ref.name]) for name, ref in program.outputs if ref.name in bare)
    ids = {port.name: Ref(port.ids) for port in ports}
    outputs = tuple((name, ids.get(name, ref)) for name, ref in program.outputs)
    return live(replace(program, outputs=outputs)), ports


def _is_rows(node: Node) -> bool:
    return node.op == LOOKUP and node.kwargs["mode"] == "rows" and isinstance(node.args[0], Ref)


def _port(name: str, node: Node) -> CachedPort:
    ids = node.args[0]
    assert isinstance(ids, Ref)
    return CachedPort(name=name, table=str(node.kwargs["table"]), ids=ids.name)
