"""User-side values keep one row per user, and are repeated over the candidates as late as possible.

A captured program assumes that every input has a row per candidate. `tile` gives user-side inputs one row per user:
what depends on them alone is computed once per user, and `plait.tile` is inserted where it meets item-side values.

`exact`: user-side arithmetic is tiled at once, so that every floating-point operator sees as many rows as in the
module and is bit-exact (a matrix product of one row takes another code path than one of 64). Lookups and
integer arithmetic are exact for any number of rows and stay on the user side.
"""

from __future__ import annotations

from dataclasses import replace

from plait_disagg.graph.edit import Draft, flat_values, map_refs
from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import LOOKUP, ROWS, TILE, USER_OF, Arg, Node, Program, Ref, Rows


def tile(program: Program, *, exact: bool = False) -> Program:
    """Return `program` (as captured) for user-side inputs with one row per user and `USER_OF`.

    Outputs have a row per candidate.
    """
    tiler = _Tiler(program, exact)
    for node in program.nodes:
        tiler.add(node)
    outputs = tuple((name, tiler.at(ref, "item", Ref(USER_OF))) for name, ref in program.outputs)
    return tiler.draft.finished(outputs)[0]


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


class _Tiler:
    def __init__(self, program: Program, exact: bool) -> None:
        self.draft = Draft(program, {})
        self._exact = exact
        self._sides: dict[str, Rows] = {port.name: port.rows for port in (*program.inputs, *program.constants)}
        self._loose: dict[str, Node] = {}
        self._known = program.values
        self._flat = flat_values(program)
        self._separate = {*self._flat, *(name + OFFSETS for name in self._flat)}

    def add(self, node: Node) -> None:
        """Add the next node, on the side of what it reads."""
        if node.op == SIZE:
            return  # made again for whoever needs it
        if node.rows == "none" and node.shape[:1] == (ROWS,):  # of constants and a row count: its readers' rows
            self._loose[node.name] = node
            return
        side = self._side(node)
        users = (Ref(name) for name in node.inputs if self._has_rows(name) and self._sides[name] == "user")
        anchor = Ref(USER_OF) if side == "item" else next(users, Ref(USER_OF))
        placed = map_refs(node, lambda ref: self.at(ref, side, anchor))
        self._sides[node.name] = side
        self.draft.add(replace(placed, rows=side))

    def at(self, ref: Ref, side: Rows, anchor: Ref) -> Ref:
        """Return the value with the rows of `side`; `anchor` is a value that has them."""
        if ref.name in self._loose:  # a copy of its own for each side
            placed = map_refs(self._loose[ref.name], lambda read: self.at(read, side, anchor))
            return self.draft.add(replace(placed, name=f"{ref.name}:{side}", rows=side))
        if ref.name not in self._sides:  # a number of rows
            return self.draft.row_count(anchor)
        if side == "item" and self._sides[ref.name] == "user" and self._has_rows(ref.name):
            return self._tiled(ref)
        return ref

    def _side(self, node: Node) -> Rows:
        if "item" in {self._sides.get(name) for name in node.inputs}:
            return "item"
        rounds = node.op != LOOKUP and _rounds(node) and node.name not in self._flat
        return "item" if self._exact and rounds else "user"

    def _has_rows(self, name: str) -> bool:
        return self._sides.get(name, "none") != "none" and name not in self._separate

    def _tiled(self, ref: Ref) -> Ref:
        name, source = f"{ref.name}:tiled", self._known[ref.name]
        kwargs: dict[str, Arg] = {"copy": True} if self._exact else {}
        args, shape, dtype = (ref, Ref(USER_OF)), source.shape, source.dtype
        return self.draft.add(Node(name=name, op=TILE, args=args, kwargs=kwargs, shape=shape, dtype=dtype, rows="item"))
