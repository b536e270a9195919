"""Tables that are so small that the HN may hold them: then ids cross in place of rows.

Before a cut, lookups of such tables are offered to it (`offer`): they read their ids as int32, which is what would
cross, and are no longer bound to the CN. The cutter decides by what crosses and what runs. Afterwards (`placed`) those
that stay on the CN are as they were, and those on the HN index a constant that has the table's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from plait_disagg.graph.edit import flat_values, live
from plait_disagg.graph.program import LOOKUP, DType, Node, Port, Program, Ref

SMALL_BYTES = 1 << 20
"""The max bytes of a table's rows in float32 that each HN holds, and copies when they are updated."""

_WORTH_BYTES = 64 << 10
"""What the lookups of a table must save in a request to be offered: five microseconds of a 100 Gbit/s link, about what
another operator costs."""

_ROWS = "small"


def offer(program: Program, table_rows: Mapping[str, int], value_bytes: Mapping[str, int]) -> Program:
    """Return the program with the lookups that may run on the HN marked, and their ids cast.

    Those of ids that are inputs, so that a request with one outside the table was refused before, in tables of
    `table_rows`, whose policy is to refuse.
    """
    ports = {port.name: port for port in program.inputs if port.name not in flat_values(program)}
    small = {node.name for node in program.nodes if _is_small(node, ports, table_rows)}
    saved: dict[str, float] = {}
    for node in program.nodes:
        if node.name in small:
            table = str(node.kwargs["table"])
            saved[table] = saved.get(table, 0.0) + value_bytes[node.name] * (1 - 1 / node.shape[-1])
    nodes: dict[str, Node] = {}
    for node in program.nodes:
        made, table = node, str(node.kwargs.get("table"))
        if node.name in small and saved[table] >= _WORTH_BYTES:
            ids = _cast(ports[node.inputs[0]])
            nodes.setdefault(ids.name, ids)
            kwargs = {**node.kwargs, _ROWS: table_rows[table]}
            made = replace(node, args=(Ref(ids.name), *node.args[1:]), kwargs=kwargs)
        nodes[node.name] = made
    return replace(program, nodes=tuple(nodes.values()))


def _is_small(node: Node, ports: Mapping[str, Port], table_rows: Mapping[str, int]) -> bool:
    """Return whether it looks up single rows of a small table by ids that are an input."""
    if node.op != LOOKUP or node.kwargs["mode"] != "rows":
        return False
    rows = table_rows.get(str(node.kwargs["table"]), 0)
    return node.parts[0].name in ports and 0 < rows * node.shape[-1] * 4 <= SMALL_BYTES


def rows_name(table: str) -> str:
    """Return the name of the constant that has a table's rows. (Lookups may have the name of their table.)"""
    return f"{table}.rows"


def is_bound(node: Node) -> bool:
    """Return whether a node must run on the CN: a lookup that is not offered."""
    return node.op == LOOKUP and _ROWS not in node.kwargs


def placed(program: Program, cn_nodes: Iterable[str]) -> Program:
    """Return the program with every offered lookup settled: as it was on the CN, or on the HN an index into the
    constant `rows_name(table)`."""
    cn, casts = frozenset(cn_nodes), {node.name: node for node in program.nodes}
    constants = {port.name: port for port in program.constants}
    nodes: list[Node] = []
    for node in program.nodes:
        if node.op != LOOKUP or _ROWS not in node.kwargs:
            nodes.append(node)
        elif node.name in cn:
            kwargs = {key: value for key, value in node.kwargs.items() if key != _ROWS}
            nodes.append(replace(node, args=(casts[node.parts[0].name].args[0], *node.args[1:]), kwargs=kwargs))
        else:
            table: Any = node.kwargs["table"]
            rows: Any = node.kwargs[_ROWS]
            name = rows_name(table)
            constants[name] = Port(name=name, shape=(rows, node.shape[-1]), dtype="float32", rows="none")
            nodes.append(replace(node, op="aten.index.Tensor", args=(Ref(name), (node.args[0],)), kwargs={}))
    return live(replace(program, nodes=tuple(nodes), constants=tuple(constants.values())))


def _cast(port: Port) -> Node:
    return Node(
        name=f"{port.name}_int32",
        op="aten.to.dtype",
        args=(Ref(port.name), DType("int32")),
        shape=port.shape,
        dtype="int32",
        rows=port.rows,
    )
