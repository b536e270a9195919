"""A cut in words and numbers: what runs where, what crosses, and how many bytes a request costs.

It is a condensed view: chains of operators become one group, and groups that do the same for the same readers are one.
And what the author of a model should know about its cut (`advice`): bytes beyond those of the request, user inputs sent
with every candidate, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal

from plait_disagg.graph.costs import value_bytes
from plait_disagg.graph.edit import reads
from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import LOOKUP, ROWS, TILE, USER_OF, Node, Port, Program, Ref, Rows
from plait_disagg.graph.split import crossing_values

CANDIDATES = (1, 64, 512)
"""The request sizes (candidates) that every report shows."""

_WIDTH = 72
"""Characters before the numbers in each line of the table."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingValues:
    """Crossing values of one kind: equal shape, dtype, side and source.

    `bytes_at` maps the number of candidates to the bytes of all of them.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    rows: Rows
    group: int
    bytes_at: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class CutReport:
    """The report of a cut. `groups` are in an order in which they can run: `CrossingValues.group` is an index."""

    groups: tuple[ValueGroup, ...]
    crossings: tuple[CrossingValues, ...]

    def bytes_at(self, candidates: int) -> int:
        """Return the bytes that cross for one request."""
        return sum(crossing.bytes_at[candidates] for crossing in self.crossings)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        sizes = self.crossings[0].bytes_at if self.crossings else {}
        return {
            "runs": [asdict(group) for group in self.groups if not group.is_input],
            "crosses": [{**asdict(crossing), "bytes_at": dict(crossing.bytes_at)} for crossing in self.crossings],
            "bytes_per_request": {str(candidates): self.bytes_at(candidates) for candidates in sizes},
        }

    def to_text(self) -> str:
        """Return the report as a table for a terminal, about 110 columns wide."""
        lines = []
        for place, title in (("cn", "runs on the CN (beside the tables)"), ("hn", "runs on the HN (the dense part)")):
            lines.append(title)
            lines += [f"  {_side(group.rows):9} {group.title}" for group in self._at(place)]
        sizes = list(self.crossings[0].bytes_at) if self.crossings else list(CANDIDATES)
        lines.append(
            f"{'crosses, bytes for one request of ... candidates':{_WIDTH}}" + "".join(f"{size:>12}" for size in sizes)
        )
        for crossing in self.crossings:
            what = f"  {_side(crossing.rows):9} {shape_text(crossing)}  {shortened(crossing.names)}"
            lines.append(
                f"{what[: _WIDTH - 1]:{_WIDTH}}" + "".join(f"{crossing.bytes_at[size]:>12,}" for size in sizes)
            )
        lines.append(f"{'  all':{_WIDTH}}" + "".join(f"{self.bytes_at(size):>12,}" for size in sizes))
        return "\n".join(lines) + "\n"

    def _at(self, place: str) -> list[ValueGroup]:
        return [group for group in self.groups if group.place == place and not group.is_input]


def cut_report(
    program: Program,
    cn_nodes: frozenset[str],
    *,
    ids_per_bag: Mapping[str, int],
    candidates: Sequence[int] = CANDIDATES,
) -> CutReport:
    """Return the report of a cut of a tiled program.

    `ids_per_bag`: ids in a typical row of each bag (1 for a bag that is not named).
    """
    groups = grouped(program, cn_nodes)
    home = {name: index for index, group in enumerate(groups) for name in group.members}
    sizes = {count: value_bytes(program, candidates=count, ids_per_bag=ids_per_bag) for count in candidates}
    values = program.values
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name in crossing_values(program, cn_nodes):
        value = values[name]
        kinds.setdefault((home[name], value.shape, value.dtype, value.rows), []).append(name)
    crossings = [
        CrossingValues(
            names=tuple(names),
            shape=values[names[0]].shape,
            dtype=values[names[0]].dtype,
            rows=values[names[0]].rows,
            group=home[names[0]],
            bytes_at={count: sum(sizes[count][name] for name in names) for count in candidates},
        )
        for names in kinds.values()
    ]
    return CutReport(groups=tuple(groups), crossings=tuple(crossings))


def shape_text(crossing: CrossingValues) -> str:
    """Return number and shape for display, as in `6 × (candidates, 32) float32`."""
    count = f"{len(crossing.names)} × " if len(crossing.names) > 1 else ""
    front = "users" if crossing.rows == "user" else "candidates"
    sizes = [front if size == ROWS else str(size) for size in crossing.shape]
    return f"{count}({', '.join(sizes)}) {crossing.dtype}"


def human_bytes(count: int) -> str:
    """Format a number of bytes, as in `640 B`, `16.0 KiB`, `1.5 MiB`."""
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.1f} KiB" if count < 1024**2 else f"{count / 1024**2:.1f} MiB"


def _side(rows: Rows) -> str:
    return {"user": "user", "item": "candidate", "none": ""}[rows]


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
        given = self.program.values[weight.name].shape[1] if isinstance(weight, Ref) else "?"
        return "MLP " + "-".join(map(str, (given, *(layer.shape[-1] for layer in layers))))


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
