"""What the author of a model should know about its cut: bytes beyond those of the request, user inputs sent with every
candidate, and why."""

from __future__ import annotations

from collections.abc import Mapping

from plait_disagg.graph.costs import value_bytes
from plait_disagg.graph.edit import reads
from plait_disagg.graph.program import LOOKUP, TILE, USER_OF, Node, Port, Program, Ref, Rows


def advice(cn: Program, *, candidates: int, ids_per_bag: Mapping[str, int]) -> tuple[str, ...]:
    """Return sentences about the CN half of a model, for one request of `candidates`; none if there is nothing odd.

    `ids_per_bag`: ids in one row of each bag (1 for a bag that is not named).
    """
    sizes = value_bytes(cn, candidates=candidates, ids_per_bag=ids_per_bag)
    values = cn.values
    crossing = [ref.name for _, ref in cn.outputs]
    read = reads(cn)
    sentences = []
    for name in crossing:
        users = _users_in(name, values, read) if values[name].rows == "item" else ()
        if users:
            where = _joined_at(name, values, read)
            sentences.append(
                f"{name} crosses for every candidate ({sizes[name]:,} bytes) and holds the user's {', '.join(users)}: "
                f"{where} joins them with the candidates' on the CN"
            )
    given, sent = (
        sum(sizes[port.name] for port in cn.inputs if port.name != USER_OF),
        sum(sizes[name] for name in crossing),
    )
    if sent > given:
        largest = max(crossing, key=lambda name: sizes[name])
        sentences.append(
            f"{sent:,} bytes cross for {candidates} candidates, and the request has {given:,}: "
            f"{largest} alone is {sizes[largest]:,}, {_why(values[largest])}"
        )
    return tuple(sentences)


def _users_in(name: str, values: Mapping[str, Port | Node], read: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the user's inputs that a value was computed from, in the order of the program."""
    seen: set[str] = set()
    left = [name]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += read.get(one, ())
    return tuple(one for one, value in values.items() if one in seen and isinstance(value, Port) and _is(value, "user"))


def _joined_at(name: str, values: Mapping[str, Port | Node], read: Mapping[str, tuple[str, ...]]) -> str:
    """Return the operator, with its place, that reads what was repeated over the candidates."""
    left = [name]
    seen: set[str] = set()
    while left:
        one = left.pop(0)
        tiled = [
            source for source in read.get(one, ()) if isinstance(values[source], Node) and _op(values[source]) == TILE
        ]
        if tiled:
            return f"{_op(values[one])} ({one})"
        left += [source for source in read.get(one, ()) if source not in seen]
        seen.update(read.get(one, ()))
    return "the output"


def _why(value: Port | Node) -> str:
    if isinstance(value, Node) and value.op == LOOKUP and isinstance(value.args[0], Ref):
        return f"rows of a table, which are wider than the ids in {value.args[0].name}"
    rows = "the user" if value.rows == "user" else "every candidate"
    return f"{'x'.join(map(str, value.shape[1:])) or '1'} numbers for {rows}"


def _op(value: Port | Node) -> str:
    return value.op if isinstance(value, Node) else "the input"


def _is(value: Port | Node, side: Rows) -> bool:
    return value.rows == side
