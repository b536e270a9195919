"""Small tools for editing programs: substitute references, drop what is not needed, find who reads what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from plait_disagg.graph.inputs import OFFSETS, WEIGHTS
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import LOOKUP, ROWS, USER_OF, Arg, Node, Program, Ref
from plait_disagg.tables.values import Lookup

_IDENTITIES = frozenset(
    {"aten.alias.default", "aten.detach.default", "aten.dropout.default", "aten.lift_fresh_copy.default"}
)


def map_refs(node: Node, change: Callable[[Ref], Ref]) -> Node:
    """Return the node with every reference replaced by the result of `change`."""

    def mapped(argument: Arg) -> Arg:
        if isinstance(argument, Ref):
            return change(argument)
        return tuple(mapped(part) for part in argument) if isinstance(argument, tuple) else argument

    args = tuple(mapped(argument) for argument in node.args)
    return replace(node, args=args, kwargs={key: mapped(value) for key, value in node.kwargs.items()})


def simplify(program: Program) -> Program:
    """Return the program without operators that return their operand unchanged or that no output needs."""
    same: dict[str, Ref] = {}
    nodes = []
    for node in program.nodes:
        mapped = map_refs(node, lambda ref: same.get(ref.name, ref))
        if mapped.op in _IDENTITIES or _is_whole_slice(mapped):
            source = mapped.args[0]
            assert isinstance(source, Ref)
            same[node.name] = source
        else:
            nodes.append(mapped)
    outputs = tuple((name, same.get(ref.name, ref)) for name, ref in program.outputs)
    return live(replace(program, nodes=tuple(nodes), outputs=outputs))


def live(program: Program) -> Program:
    """Return the program without the nodes and constants that no output needs. Inputs stay: callers send them."""
    needed = {ref.name for _, ref in program.outputs}
    nodes = []
    for node in reversed(program.nodes):
        if node.name in needed:
            needed.update(node.inputs)
            nodes.append(node)
    constants = tuple(port for port in program.constants if port.name in needed)
    return replace(program, nodes=tuple(reversed(nodes)), constants=constants)


def reads(program: Program) -> Mapping[str, tuple[str, ...]]:
    """Map each node to the values that it reads and that a cut may separate from it.

    Constants and `USER_OF` are left out (both sides have them); a number is replaced by the tensor that it is
    counted on.
    """
    free = {port.name for port in program.constants} | {USER_OF}
    counted = {node.name: node.inputs for node in program.nodes if node.op == SIZE}
    found = {}
    for node in program.nodes:
        if node.op != SIZE:
            names = [tensor for name in node.inputs for tensor in counted.get(name, (name,))]
            found[node.name] = tuple(dict.fromkeys(name for name in names if name not in free))
    return found


def lookups_of(program: Program) -> tuple[Lookup, ...]:
    """Return the lookups of a program, in program order."""
    found = []
    for node in program.nodes:
        if node.op == LOOKUP:
            mode: Any = node.kwargs["mode"]
            found.append(Lookup(name=node.name, table=str(node.kwargs["table"]), mode=mode))
    return tuple(found)


def flat_values(program: Program) -> Mapping[str, str]:
    """Map each value whose first dimension counts the ids of a bag to that bag.

    These are the flat ids and whatever is computed from them before a lookup pools it.
    """
    ports = {port.name for port in program.inputs}
    flat = {name: name for name in ports if name + OFFSETS in ports}
    flat |= {name + WEIGHTS: name for name in flat if name + WEIGHTS in ports}
    for node in program.nodes:
        pooled = node.op == LOOKUP and node.args[1] is not None
        bags = [flat[name] for name in node.inputs if name in flat]
        if bags and not pooled:
            flat[node.name] = bags[0]
    return flat


def is_loose(node: Node) -> bool:
    """Return whether a value gets its rows from its readers: made of constants and a row count (zeros, an expanded
    token)."""
    return node.rows == "none" and node.shape[:1] == (ROWS,)


def _is_whole_slice(node: Node) -> bool:
    if node.op != "aten.slice.Tensor":
        return False
    dim, start, end, step = node.args[1:] + (0, None, None, 1)[len(node.args) - 1 :]
    whole = end is None or (isinstance(end, int) and end >= 2**62)
    return start in (0, None) and whole and step == 1 and isinstance(dim, int)
