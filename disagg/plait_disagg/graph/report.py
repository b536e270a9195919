"""A cut in words and numbers: what runs where, what crosses, and how many bytes a request costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait_disagg.graph.costs import value_bytes
from plait_disagg.graph.cut import crossing_values
from plait_disagg.graph.groups import ValueGroup, grouped, shortened
from plait_disagg.graph.program import ROWS, Node, Port, Program, Rows

CANDIDATES = (1, 64, 512)
"""The request sizes (candidates) that every report shows."""

_WIDTH = 72
"""Characters before the numbers in each line of the table."""


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
            count = f"{len(crossing.names)} × " if len(crossing.names) > 1 else ""
            kind = f"{count}{shape_text(crossing)}  {shortened(crossing.names)}"
            what = f"  {_side(crossing.rows):9} {kind}"
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
    values: dict[str, Port | Node] = {port.name: port for port in program.inputs}
    values |= {node.name: node for node in program.nodes}
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
    """Return the shape for display, as in `(candidates, 32) float32`."""
    front = "users" if crossing.rows == "user" else "candidates"
    sizes = [front if size == ROWS else str(size) for size in crossing.shape]
    return f"({', '.join(sizes)}) {crossing.dtype}"


def human_bytes(count: int) -> str:
    """Format a number of bytes, as in `640 B`, `16.0 KiB`, `1.5 MiB`."""
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.1f} KiB" if count < 1024**2 else f"{count / 1024**2:.1f} MiB"


def _side(rows: Rows) -> str:
    return {"user": "user", "item": "candidate", "none": ""}[rows]
