"""Small tools for programs: make one, substitute references, drop what is not needed, find who reads what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from plait_disagg.graph.inputs import OFFSETS, WEIGHTS
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import LOOKUP, USER_OF, DType, Node, Port, Program, Ref, Rows


class Draft:
    """A program in the making. It begins with the inputs and constants of `program`; nodes and constants are added."""

    def __init__(self, program: Program, constants: Mapping[str, torch.Tensor]) -> None:
        self._program = program
        self._tensors = dict(constants)
        self._values: dict[str, Port | Node] = {port.name: port for port in (*program.inputs, *program.constants)}

    def __getitem__(self, name: str) -> Port | Node:
        """Return an input, a constant or a node."""
        return self._values[name]

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a constant's numbers; None if there is no constant of that name."""
        return self._tensors.get(name)

    def add(self, node: Node) -> Ref:
        """Add a node, unless there is one of its name."""
        self._values.setdefault(node.name, node)
        return Ref(node.name)

    def constant(self, name: str, tensor: torch.Tensor) -> Ref:
        """Add a constant, unless there is one of its name."""
        if name not in self._tensors:
            self._tensors[name] = tensor
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._values[name] = Port(name=name, shape=tuple(tensor.shape), dtype=dtype, rows="none")
        return Ref(name)

    def row_count(self, of: Ref) -> Ref:
        """Add the number of rows of a value."""
        return self.add(Node(name=f"{of.name}:rows", op=SIZE, args=(of, 0), dtype="int"))

    def finished(self, outputs: tuple[tuple[str, Ref], ...]) -> tuple[Program, dict[str, torch.Tensor]]:
        """Return the program with these outputs, without what none of them needs, and its constants."""
        inputs, values = {port.name for port in self._program.inputs}, self._values.values()
        constants = tuple(value for value in values if isinstance(value, Port) and value.name not in inputs)
        nodes = tuple(value for value in values if isinstance(value, Node))
        made = live(replace(self._program, constants=constants, nodes=nodes, outputs=outputs))
        return made, {port.name: self._tensors[port.name] for port in made.constants if port.name in self._tensors}


def resolve(arguments: Any, values: Mapping[str, Any]) -> Any:
    """Return arguments of a node with references replaced by their values, and dtypes by torch's."""

    def found(part: Any) -> Any:
        if isinstance(part, Ref):
            return values[part.name]
        return getattr(torch, part.name) if isinstance(part, DType) else part

    return tree_map(found, arguments)


def map_refs(node: Node, change: Callable[[Ref], Ref]) -> Node:
    """Return the node with every reference replaced by the result of `change`."""

    def mapped(part: Any) -> Any:
        return change(part) if isinstance(part, Ref) else part

    return replace(node, args=tree_map(mapped, node.args), kwargs=tree_map(mapped, dict(node.kwargs)))


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


def rows_side(sides: Iterable[Rows]) -> Rows:
    """Return whose rows a value has that is made of values with these."""
    made = set(sides)
    return "item" if "item" in made else "user" if "user" in made else "none"
