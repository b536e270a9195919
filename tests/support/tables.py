"""Random tables and lookups, and shards in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import strategies as st

from plait_disagg.tables.pieces import HeldPieces
from plait_disagg.tables.plan import ShardPlan, cut_table
from plait_disagg.tables.protocols import LookupRequest, ShardTables
from plait_disagg.tables.sharded import ShardedTables
from plait_disagg.tables.storage import TableSet, open_tables, write_tables
from plait_disagg.tables.values import Mode, RowFormat, Table

Weights = Mapping[str, torch.Tensor]
MODES: tuple[Mode, ...] = ("rows", "sum", "mean", "max")


def make_weights(
    seed: int = 0, shapes: Sequence[tuple[int, int]] = ((7, 32), (19, 32), (3, 5), (64, 32), (1, 5))
) -> Weights:
    """A table of each shape, named t0, t1, ...; values are normal."""
    generator = torch.Generator().manual_seed(seed)
    return {f"t{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}


def make_ask(
    table: str, mode: Mode, bags: Sequence[Sequence[int]], *, weighted: bool = False, dtype: torch.dtype = torch.int64
) -> LookupRequest:
    """An ask for these bags of ids; mode rows takes the ids of all of them, as one column."""
    ids = torch.tensor([one for bag in bags for one in bag], dtype=dtype)
    if mode == "rows":
        return LookupRequest(table=table, mode=mode, ids=ids.reshape(-1, 1))
    sizes = torch.tensor([0, *map(len, bags)], dtype=dtype)
    weights = torch.linspace(-1, 2, len(ids)) if weighted else None
    return LookupRequest(table=table, mode=mode, ids=ids, offsets=sizes.cumsum(0).to(dtype), weights=weights)


@st.composite
def asks(draw: st.DrawFn, weights: Weights, *, outside: bool = False) -> list[LookupRequest]:
    """Up to six asks with empty bags, empty batches and repeated ids among them; ``outside``: ids of any size."""
    found = []
    for _ in range(draw(st.integers(0, 6))):
        table = draw(st.sampled_from(sorted(weights)))
        mode = draw(st.sampled_from(MODES))
        inside = st.integers(0, weights[table].shape[0] - 1)
        ids = st.one_of(inside, st.integers(-(2**63), 2**63 - 1)) if outside else inside
        bags = draw(st.lists(st.lists(ids, max_size=5), max_size=5))
        weighted = mode == "sum" and draw(st.booleans())
        dtype = torch.int64 if outside else draw(st.sampled_from((torch.int64, torch.int32)))
        found.append(make_ask(table, mode, bags, weighted=weighted, dtype=dtype))
    return found


def stored(weights: Weights, **options: Any) -> TableSet:
    """Written to a file and mapped, as `write_tables` is told; the file itself is gone."""
    with TemporaryDirectory() as folder:
        write_tables(Path(folder) / "tables.safetensors", weights, **options)
        return open_tables(Path(folder) / "tables.safetensors")


class LocalShard:
    """A shard in this process."""

    def __init__(self, held: HeldPieces) -> None:
        self.held = held

    def begin(self, requests: Sequence[LookupRequest], version: str) -> Callable[[], list[torch.Tensor]]:
        """See `ShardTables`."""
        return lambda: self.held.lookup(requests)


def joined(
    tables: Sequence[Table], plan: ShardPlan, shards: Sequence[ShardTables], row_format: RowFormat = "float32"
) -> ShardedTables:
    """Those tables at those shards, stored in one format."""
    formats: dict[str, RowFormat] = {table.name: row_format for table in tables}
    return ShardedTables(tables, formats, plan, shards)


def deal(tables: Sequence[Table], parts: int, shards: int, *, pooled: bool = True) -> ShardPlan:
    """A plan that only deals: piece k of all goes to shard k modulo ``shards``."""
    pieces = [piece for table in tables for piece in cut_table(table, parts, pooled=pooled)]
    placed = tuple(piece.on(index % shards) for index, piece in enumerate(pieces))
    return ShardPlan(pieces=placed, read_bytes=(0.0,) * shards, held_bytes=(0,) * shards)


def held_by(plan: ShardPlan, weights: Weights, row_format: RowFormat = "float32") -> list[HeldPieces]:
    """What each shard of a plan holds, in memory."""
    tables = stored(weights, formats=row_format)
    return [HeldPieces(tables, plan.of_shard(shard)) for shard in range(plan.shards)]
