"""What the author of a model should know about its cut: bytes beyond those of the request, user inputs sent with every
candidate, and why."""

from __future__ import annotations

from collections.abc import Mapping

from plait_disagg.graph.costs import value_bytes
from plait_disagg.graph.edit import reads
from plait_disagg.graph.program import LOOKUP, TILE, USER_OF, Node, Port, Program


def advice(cn: Program, *, candidates: int, ids_per_bag: Mapping[str, int]) -> tuple[str, ...]:
    """Return sentences about the CN half of a model, for one request of `candidates`; none if there is nothing odd.

    `ids_per_bag`: ids in one row of each bag (1 for a bag that is not named).
    """
    sizes = value_bytes(cn, candidates=candidates, ids_per_bag=ids_per_bag)
    values = cn.values
    crossing = [ref.name for _, ref in cn.outputs]
    sentences = []
    for name in crossing:
        users, where = _users_in(cn, name) if values[name].rows == "item" else ((), "")
        if users:
            sentences.append(
                f"{name} crosses for every candidate ({sizes[name]:,} bytes) and holds the user's {', '.join(users)}: "
                f"{where} joins them with the candidates' on the CN"
            )
    given = sum(sizes[port.name] for port in cn.inputs if port.name != USER_OF)
    sent = sum(sizes[name] for name in crossing)
    if sent > given:
        largest = max(crossing, key=lambda name: sizes[name])
        sentences.append(
            f"{sent:,} bytes cross for {candidates} candidates, and the request has {given:,}: "
            f"{largest} alone is {sizes[largest]:,}, {_why(values[largest])}"
        )
    return tuple(sentences)


def _users_in(cn: Program, name: str) -> tuple[tuple[str, ...], str]:
    """Return the user's inputs that a value was computed from, and the operator, with its place, that reads what was
    repeated over the candidates."""
    read, needed, where = reads(cn), {name}, "the output"
    tiled = {node.name for node in cn.nodes if node.op == TILE}
    for node in reversed(cn.nodes):
        if node.name in needed:
            sources = read.get(node.name, ())
            needed.update(sources)
            if where == "the output" and not tiled.isdisjoint(sources):
                where = f"{node.op} ({node.name})"
    return tuple(port.name for port in cn.inputs if port.name in needed and port.rows == "user"), where


def _why(value: Port | Node) -> str:
    if isinstance(value, Node) and value.op == LOOKUP:
        return f"rows of a table, which are wider than the ids in {value.parts[0].name}"
    rows = "the user" if value.rows == "user" else "every candidate"
    return f"{'x'.join(map(str, value.shape[1:])) or '1'} numbers for {rows}"
