"""A condensed view of a program for readers: chains of operators become one box, and boxes that do the same for the
same readers are merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from plait_disagg.graph.edit import reads
from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import LOOKUP, TILE, Node, Port, Program, Ref, Rows

Place = Literal["cn", "hn"]

_IN_MLP = frozenset({"linear", "relu", "prelu", "sigmoid", "tanh", "gelu", "silu", "leaky_relu", "elu", "squeeze"})
"""Operators that may follow a linear layer without being named in the label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueGroup:
    """A box of the condensed view.

    `members`: values (inputs or nodes) in program order. `readers`: indices of groups in the list that `grouped`
    returns.
    """

    title: str
    members: tuple[str, ...]
    place: Place
    rows: Rows
    readers: tuple[int, ...]
    is_input: bool = False


def grouped(program: Program, cn_nodes: frozenset[str]) -> list[ValueGroup]:
    """Return all inputs that are read and all nodes of a tiled program as groups, in an order in which they can run."""
    sketch = _Sketch(program, cn_nodes)
    merged = sketch.merged(sketch.chains())
    merged.sort(key=lambda chains: max(sketch.order[name] for chain in chains for name in chain))
    home = {name: index for index, chains in enumerate(merged) for chain in chains for name in chain}
    return [sketch.group(chains, home) for chains in merged]


def shortened(names: Sequence[str], max_names: int = 2) -> str:
    """Format a list of names for display: all of them, or the first and the last."""
    if len(names) <= max_names:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]}"


_Chain = tuple[str, ...]


@dataclass
class _Sketch:
    program: Program
    cn_nodes: frozenset[str]
    values: dict[str, Port | Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read = reads(self.program)
        self.readers: dict[str, list[str]] = {}
        for name, values in self.read.items():
            for value in values:
                self.readers.setdefault(value, []).append(name)
        self.outputs = {ref.name for _, ref in self.program.outputs}
        for port in self.program.inputs:
            if port.name in self.readers or port.name in self.outputs:
                self.values[port.name] = port
        self.values |= {node.name: node for node in self.program.nodes if node.op != SIZE}
        self.order = {name: index for index, name in enumerate(self.values)}
        self.widths = {port.name: port.shape for port in self.program.constants}

    def place(self, name: str) -> Place:
        return "cn" if name in self.cn_nodes or name not in self.read else "hn"

    def chains(self) -> list[_Chain]:
        """Return runs of nodes, each the only reader of the one before, on one side of the cut and with the rows of one
        side."""
        start_of: dict[str, str] = {}
        chains: dict[str, list[str]] = {}
        for name, value in self.values.items():
            before = self.read.get(name, ())
            joins = len(before) == 1 and before[0] in start_of and self._continues(before[0], name, value)
            start = start_of[before[0]] if joins else name
            start_of[name] = start
            chains.setdefault(start, []).append(name)
        return [tuple(chain) for chain in chains.values()]

    def _continues(self, before: str, name: str, value: Port | Node) -> bool:
        one = self.values[before]
        plain = isinstance(one, Node) and isinstance(value, Node) and {one.op, value.op}.isdisjoint((LOOKUP, TILE))
        same = self.place(before) == self.place(name) and one.rows == value.rows
        return plain and same and self.readers[before] == [name] and before not in self.outputs

    def merged(self, chains: Sequence[_Chain]) -> list[list[_Chain]]:
        """Merge chains of the same operators, place and side that have the same readers."""
        found: dict[object, list[_Chain]] = {}
        key_of: dict[str, object] = {}
        for chain in reversed(chains):  # readers first
            ends = frozenset(key_of[reader] for reader in self.readers.get(chain[-1], ()) if reader in key_of)
            key = (self.place(chain[0]), self._looks(chain), ends, chain[-1] in self.outputs)
            key_of.update(dict.fromkeys(chain, key))
            found.setdefault(key, []).insert(0, chain)
        return list(found.values())

    def _looks(self, chain: _Chain) -> tuple[object, ...]:
        looks: list[object] = []
        for name in chain:
            value = self.values[name]
            what = (value.op, value.kwargs.get("mode")) if isinstance(value, Node) else ("input", self._is_ids(value))
            looks.append((what, value.rows, None if isinstance(value, Port) and self._is_ids(value) else value.shape))
        return tuple(looks)

    def _is_ids(self, port: Port) -> bool:
        return port.dtype.startswith("int")

    def group(self, chains: Sequence[_Chain], home: Mapping[str, int]) -> ValueGroup:
        members = tuple(sorted((name for chain in chains for name in chain), key=self.order.__getitem__))
        here = home[members[0]]
        readers = {home[reader] for name in members for reader in self.readers.get(name, ())} - {here}
        value = self.values[members[-1]]
        return ValueGroup(
            title=self._title(chains),
            members=members,
            place=self.place(members[0]),
            rows=value.rows,
            readers=tuple(sorted(readers)),
            is_input=isinstance(value, Port),
        )

    def _title(self, chains: Sequence[_Chain]) -> str:
        first = [self.values[name] for name in chains[0]]
        nodes = [value for value in first if isinstance(value, Node)]
        if not nodes:
            every = [name for chain in chains for name in chain]
            named = [name for name in every if not self._is_offsets(name)] or every
            what = "ids" if self._is_ids(first[0]) else "numbers"  # type: ignore[arg-type]
            return f"{what}: {shortened(named)}" + (f" ({len(named)})" if len(named) > 2 else "")
        text = self._work(nodes)
        return f"{len(chains)} × {text}" if len(chains) > 1 else text

    def _is_offsets(self, name: str) -> bool:
        return name.endswith(OFFSETS) and name.removesuffix(OFFSETS) in self.values

    def _work(self, nodes: Sequence[Node]) -> str:
        names = [node.op.split(".")[1] for node in nodes]
        if names == ["lookup"]:
            return f"lookup, {nodes[0].kwargs['mode']}, {nodes[0].shape[-1]} wide"
        if names == ["tile"]:
            return "repeat over candidates"
        words: list[str] = []
        for is_mlp, run in groupby(nodes, key=lambda node: node.op.split(".")[1] in _IN_MLP):
            members = list(run)
            layers = [node for node in members if is_mlp and node.op.startswith("aten.linear")]
            words += [self._mlp(layers)] if layers else [node.op.split(".")[1].strip("_") for node in members]
        return ", ".join(words) if len(words) <= 4 else f"{', '.join(words[:3])}, … ({len(words)})"

    def _mlp(self, layers: Sequence[Node]) -> str:
        weight = layers[0].args[1]
        given = self.widths[weight.name][1] if isinstance(weight, Ref) else "?"
        return "MLP " + "-".join(map(str, (given, *(layer.shape[-1] for layer in layers))))
