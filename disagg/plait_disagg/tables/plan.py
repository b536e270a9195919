"""Which shard holds which part of which table.

A table stays whole or is split, and no split changes a bit of a result. One that is pooled is split by columns while
these stay wide enough: every shard pools its columns, results are concatenated. Any other is split by rows: shards
send the rows, and whoever asks puts them together or pools them.

The plan balances the bytes that a shard reads per request: ids of the piece per request times the cache lines of its
row, plus a fixed cost per piece. Ids are assumed to be evenly spread over a table's rows; hot rows that lie together
make a row split uneven, which cannot happen with a column split. Replicas of a shard follow its load (`queue/scale`).

The search is greedy. Start with whole tables, the heaviest first, each onto the least loaded shard that has room
(LPT, at most 4/3 of the best for whole tables: Graham, SIAM J. Appl. Math. 17, 1969). While shards are uneven or
something does not fit, split the table responsible into one more piece and place everything anew; keep the best plan
seen. Splitting everything over all shards is tried too, so that tables which fit in total are never refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from plait_disagg.tables.values import RowFormat, Table, row_bytes

LINE_BYTES = 64
"""The unit of a memory read (a cache line of x86 and of most Arm servers): a row costs whole lines."""

PIECE_BYTES = 8_192
"""The cost of one more piece to a shard, per request and expressed as bytes read: about a microsecond of dispatch at
8 GB/s of random rows."""

_NARROWEST = LINE_BYTES // 4
"""The min columns of a column cut: one line of float32. Narrower pieces would read the same lines on several shards."""

_FEW = 64
"""The number of placements of a cut up to which all are tried: three tables on two shards."""

_EVEN_ENOUGH = 1.02
"""The search stops when the fullest shard reads at most this many times the average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePiece:
    """Part of a table on one shard.

    Rows `first_row : first_row + rows` and columns `first_column : first_column + columns`.
    """

    table: str
    first_row: int
    rows: int
    first_column: int
    columns: int
    shard: int = -1

    @property
    def name(self) -> str:
        """The shard's name for it, as a table of its own."""
        last_row, last_column = self.first_row + self.rows, self.first_column + self.columns
        return f"{self.table}[{self.first_row}:{last_row},{self.first_column}:{last_column}]"

    def on(self, shard: int) -> TablePiece:
        """Return the same piece on that shard."""
        return replace(self, shard=shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Pieces that cover every table once. `read_bytes` (per request) and `held_bytes` are by shard."""

    pieces: tuple[TablePiece, ...]
    read_bytes: tuple[float, ...]
    held_bytes: tuple[int, ...]

    @property
    def shards(self) -> int:
        """Number of shards; some may be empty."""
        return len(self.read_bytes)

    def of_table(self, table: str) -> tuple[TablePiece, ...]:
        """Return its pieces, first rows and columns first."""
        return tuple(piece for piece in self.pieces if piece.table == table)

    def of_shard(self, shard: int) -> tuple[TablePiece, ...]:
        """Return the pieces that a shard holds."""
        return tuple(piece for piece in self.pieces if piece.shard == shard)


@dataclass(frozen=True, slots=True)
class _Costs:
    """A piece and its cost to the shard that holds it."""

    piece: TablePiece
    read_bytes: float
    held_bytes: int


def plan_shards(
    tables: Sequence[Table],
    *,
    shards: int,
    memory_bytes: int,
    lookups_per_request: Mapping[str, float],
    pooled: frozenset[str] = frozenset(),
    formats: RowFormat | Mapping[str, RowFormat] = "float32",
) -> ShardPlan:
    """Plan shards of at most `memory_bytes` each. `lookups_per_request`: ids by table (0 for a table not named);
    `pooled`: tables whose rows are only read in bags.

    Raises ValueError if the tables do not fit.
    """
    if shards < 1 or len({table.name for table in tables}) != len(tables):
        raise ValueError("there must be at least one shard, and no table twice")
    chooser = _Search(tables, lookups_per_request, pooled, formats, shards=shards, memory_bytes=memory_bytes)
    plan = chooser.best()
    if plan is None:
        held = sum(costs.held_bytes for table in tables for costs in chooser.costs(table, 1))
        raise ValueError(f"tables of {held:,} bytes do not fit into {shards} shards of {memory_bytes:,}")
    return plan


def cut_table(table: Table, parts: int, *, pooled: bool) -> tuple[TablePiece, ...]:
    """Split the table into `parts` nearly equal pieces: a `pooled` one by columns while those stay wide enough, any
    other by rows.

    Returns fewer pieces if it has fewer rows than parts.
    """
    if parts > 1 and (not pooled or table.dim // parts < _NARROWEST):
        edges = _edges(table.rows, min(parts, table.rows))
        return tuple(
            TablePiece(table=table.name, first_row=first, rows=last - first, first_column=0, columns=table.dim)
            for first, last in edges
        )
    return tuple(
        TablePiece(table=table.name, first_row=0, rows=table.rows, first_column=first, columns=last - first)
        for first, last in _edges(table.dim, parts)
    )


class _Search:
    """Tries splits and places their pieces."""

    def __init__(
        self,
        tables: Sequence[Table],
        lookups: Mapping[str, float],
        pooled: frozenset[str],
        formats: RowFormat | Mapping[str, RowFormat],
        *,
        shards: int,
        memory_bytes: int,
    ) -> None:
        self._tables = {table.name: table for table in tables}
        self._lookups = lookups
        self._pooled = pooled
        self._formats = formats
        self._shards = shards
        self._memory_bytes = memory_bytes

    def best(self) -> ShardPlan | None:
        """Return the most even plan found, or None; for a few tables, the most even one there is."""
        if self._shards ** (self._shards * len(self._tables)) <= _FEW:
            return min(self._all(), key=lambda plan: max(plan.read_bytes), default=None)
        return self._found()

    def _all(self) -> Iterator[ShardPlan]:
        """Yield every plan that fits: all numbers of equal splits, all placements."""
        for parts in product(range(1, self._shards + 1), repeat=len(self._tables)):
            cuts = zip(self._tables.values(), parts, strict=True)
            pieces = [costs for table, count in cuts for costs in self.costs(table, count)]
            for places in product(range(self._shards), repeat=len(pieces)):
                plan = self._planned(pieces, places)
                if max(plan.held_bytes) <= self._memory_bytes:
                    yield plan

    def _planned(self, pieces: Sequence[_Costs], places: Iterable[int]) -> ShardPlan:
        """Return the plan with each piece on its shard, in the order of the tables."""
        read, held = [0.0] * self._shards, [0] * self._shards
        placed = []
        for shard, costs in zip(places, pieces, strict=True):
            read[shard] += costs.read_bytes
            held[shard] += costs.held_bytes
            placed.append(costs.piece.on(shard))
        return ShardPlan(pieces=tuple(placed), read_bytes=tuple(read), held_bytes=tuple(held))

    def _found(self) -> ShardPlan | None:
        parts = dict.fromkeys(self._tables, 1)
        best: ShardPlan | None = None
        in_vain = 0
        while in_vain <= len(self._tables) + 2 * self._shards:
            pieces = [costs for name, count in parts.items() for costs in self.costs(self._tables[name], count)]
            plan, blocked = self._place(pieces)
            in_vain += 1
            if plan is not None and (best is None or max(plan.read_bytes) < max(best.read_bytes)):
                best, in_vain = plan, 0
            if plan is not None and max(plan.read_bytes) * self._shards <= _EVEN_ENOUGH * sum(plan.read_bytes):
                break
            name = self._next_cut(plan, blocked, pieces, parts)
            if name is None:
                break
            parts[name] += 1
        smallest = [costs for table in self._tables.values() for costs in self.costs(table, self._shards)]
        return best or self._place(smallest)[0]

    def costs(self, table: Table, parts: int) -> list[_Costs]:
        """Return the pieces of a table split into `parts`, each with its cost."""
        row_format = self._formats if isinstance(self._formats, str) else self._formats.get(table.name, "float32")
        found = []
        for piece in self._cut(table, parts):
            stored = row_bytes(piece.columns, row_format)
            ids = self._lookups.get(table.name, 0.0) * piece.rows / table.rows
            lines = -(-stored // LINE_BYTES)
            found.append(_Costs(piece, ids * lines * LINE_BYTES + PIECE_BYTES, piece.rows * stored))
        return found

    def _cut(self, table: Table, parts: int) -> tuple[TablePiece, ...]:
        return cut_table(table, parts, pooled=table.name in self._pooled)

    def _place(self, pieces: Sequence[_Costs]) -> tuple[ShardPlan | None, _Costs | None]:
        """Return the pieces on shards, and None; or None, and the piece that had no room."""
        blocked = None
        for heaviest_first in (_by_reading, _by_holding):
            read, held = [0.0] * self._shards, [0] * self._shards
            placed: dict[TablePiece, int] = {}
            blocked = None
            for costs in sorted(pieces, key=heaviest_first):
                room = [k for k in range(self._shards) if held[k] + costs.held_bytes <= self._memory_bytes]
                if not room:
                    blocked = costs
                    break
                shard = min(room, key=lambda k: (read[k], held[k], k))
                read[shard] += costs.read_bytes
                held[shard] += costs.held_bytes
                placed[costs.piece] = shard
            if blocked is None:
                return self._planned(pieces, [placed[costs.piece] for costs in pieces]), None
        return None, blocked

    def _next_cut(
        self, plan: ShardPlan | None, blocked: _Costs | None, pieces: Sequence[_Costs], parts: Mapping[str, int]
    ) -> str | None:
        """Return the table to split once more: the one that does not fit, the heaviest of the fullest shard, or any
        other.

        Returns None if all are split as far as possible.
        """
        if plan is None:
            order = [blocked] if blocked else []
            order += sorted(pieces, key=_by_holding)
        else:
            fullest = plan.read_bytes.index(max(plan.read_bytes))
            there = {piece.table for piece in plan.of_shard(fullest)}
            order = sorted(pieces, key=lambda costs: (costs.piece.table not in there, *_by_reading(costs)))
        for costs in order:
            name = costs.piece.table
            if parts[name] < self._shards and len(self._cut(self._tables[name], parts[name] + 1)) > parts[name]:
                return name
        return None


def _by_reading(costs: _Costs) -> tuple[float, int, str]:
    return -costs.read_bytes, -costs.held_bytes, costs.piece.name


def _by_holding(costs: _Costs) -> tuple[int, float, str]:
    return -costs.held_bytes, -costs.read_bytes, costs.piece.name


def _edges(size: int, parts: int) -> list[tuple[int, int]]:
    """Return `parts` adjacent ranges that cover `size`, whose lengths differ by at most one."""
    return [(size * k // parts, size * (k + 1) // parts) for k in range(parts)]
