"""User-side values keep one row per user, and are repeated over the candidates as late as possible.

A captured program assumes that every input has a row per candidate. `tile` gives user-side inputs one row per user:
what depends on them alone is computed once per user, and `plait.tile` is inserted where it meets item-side values.

`exact`: user-side arithmetic is tiled at once, so that every floating-point operator sees as many rows as in the
module and is bit-exact (a matrix product of one row takes another code path than one of 64). Lookups and
integer arithmetic are exact for any number of rows and stay on the user side.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from plait_disagg.graph.edit import flat_values, is_loose, live, map_refs
from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import LOOKUP, TILE, USER_OF, Arg, Node, Program, Ref, Rows


def tile(program: Program, *, exact: bool = False) -> Program:
    """Return `program` (as captured) for user-side inputs with one row per user and `USER_OF`.

    Outputs have a row per candidate.
    """
    tiler = _Tiler(program, exact)
    for node in program.nodes:
        tiler.add(node)
    outputs = tuple((name, tiler.at(ref, "item", Ref(USER_OF))) for name, ref in program.outputs)
    return live(replace(program, nodes=tuple(tiler.nodes), outputs=outputs))


def keeps_bits(program: Program) -> bool:
    """Return whether a single request through a tiled program is bit-exact: no arithmetic that rounds is done per user.

    An exact program is, except for one whose user-side bags compute weights from their own ids (as many rows as
    ids).
    """
    return not any(
        (node.op == TILE and not node.kwargs.get("copy"))
        or (node.rows == "user" and node.op != LOOKUP and _rounds(node))
        for node in program.nodes
    )


def _rounds(node: Node) -> bool:
    return node.dtype.startswith(("float", "bfloat"))


@dataclass
class _Tiler:
    program: Program
    exact: bool
    nodes: list[Node] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    sides: dict[str, Rows] = field(default_factory=dict)
    loose: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sides.update((port.name, port.rows) for port in (*self.program.inputs, *self.program.constants))
        self.known = {port.name: port for port in self.program.inputs} | {
            node.name: node for node in self.program.nodes
        }
        self.flat = flat_values(self.program)
        self.separate = {*self.flat, *(name + OFFSETS for name in self.flat)}

    def add(self, node: Node) -> None:
        """Add the next node, on the side of what it reads."""
        if node.op == SIZE:
            return  # made again for whoever needs it
        if is_loose(node):
            self.loose[node.name] = node
            return
        side = self._side(node)
        anchor = next(
            (Ref(name) for name in node.inputs if self._has_rows(name) and self.sides[name] == "user"), Ref(USER_OF)
        )
        if side == "item":
            anchor = Ref(USER_OF)
        placed = map_refs(node, lambda ref: self.at(ref, side, anchor))
        self.sides[node.name] = side
        self._emit(replace(placed, rows=side))

    def at(self, ref: Ref, side: Rows, anchor: Ref) -> Ref:
        """Return the value with the rows of `side`; `anchor` is a value that has them."""
        if ref.name in self.loose:
            return self._tightened(self.loose[ref.name], side, anchor)
        if ref.name not in self.sides:  # a number of rows
            return self._row_count(anchor)
        if side == "item" and self.sides[ref.name] == "user" and self._has_rows(ref.name):
            return self._tiled(ref)
        return ref

    def _side(self, node: Node) -> Rows:
        sides = {self.sides[name] for name in node.inputs if name in self.sides} - {"none"}
        if "item" in sides:
            return "item"
        rounds = node.op != LOOKUP and _rounds(node) and node.name not in self.flat
        return "item" if self.exact and rounds else "user"

    def _has_rows(self, name: str) -> bool:
        return name in self.sides and self.sides[name] != "none" and name not in self.separate

    def _tiled(self, ref: Ref) -> Ref:
        name = f"{ref.name}:tiled"
        source = self.known[ref.name]
        kwargs: dict[str, Arg] = {"copy": True} if self.exact else {}
        args: tuple[Arg, ...] = (ref, Ref(USER_OF))
        self._emit(
            Node(name=name, op=TILE, args=args, kwargs=kwargs, shape=source.shape, dtype=source.dtype, rows="item")
        )
        return Ref(name)

    def _tightened(self, node: Node, side: Rows, anchor: Ref) -> Ref:
        """Add a copy of a node whose rows are not fixed, with the rows of `side`."""
        name = f"{node.name}:{side}"
        placed = map_refs(node, lambda ref: self.at(ref, side, anchor))
        self._emit(replace(placed, name=name, rows=side))
        return Ref(name)

    def _row_count(self, anchor: Ref) -> Ref:
        name = f"{anchor.name}:rows"
        self._emit(Node(name=name, op=SIZE, args=(anchor, 0), dtype="int"))
        return Ref(name)

    def _emit(self, node: Node) -> None:
        if node.name not in self.made:
            self.made.add(node.name)
            self.nodes.append(node)
