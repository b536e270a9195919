"""Sharding plans: they cover every table once, respect memory, and come near the best."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.plan import LINE_BYTES, PIECE_BYTES, ShardPlan, cut_table, plan_shards
from plait_disagg.tables.values import RowFormat, Table, row_bytes
from support.tables import LocalShard, asks, held_by, joined, make_weights, stored


@st.composite
def problems(draw: st.DrawFn, *, most: int = 5) -> tuple[list[Table], dict[str, float]]:
    """A few tables and how often each is looked up."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 400), st.sampled_from((4, 16, 32, 48))), min_size=1, max_size=most))
    tables = [Table(name=f"t{index}", rows=rows, dim=dim) for index, (rows, dim) in enumerate(shapes)]
    return tables, {table.name: draw(st.floats(0, 2000)) for table in tables}


def held_bytes(tables: Sequence[Table]) -> int:
    """What they take together."""
    return sum(table.rows * row_bytes(table.dim, "float32") for table in tables)


def assert_covers(plan: ShardPlan, tables: Sequence[Table]) -> None:
    """Every value of every table is on exactly one shard."""
    for table in tables:
        counts = torch.zeros(table.rows, table.dim)
        for piece in plan.of_table(table.name):
            assert 0 <= piece.shard < plan.shards
            counts[
                piece.first_row : piece.first_row + piece.rows, piece.first_column : piece.first_column + piece.columns
            ] += 1
        assert bool((counts == 1).all())


@settings(max_examples=50)
@given(problem=problems(), shards=st.integers(1, 4), spare=st.floats(1.0, 3.0))
def test_plans_cover_and_fit(problem: tuple[list[Table], dict[str, float]], shards: int, spare: float):
    """Every value lies on one shard, and no shard holds more than it may, or the refusal was due to rounding."""
    tables, lookups = problem
    memory = int(held_bytes(tables) / shards * spare)
    try:
        plan = plan_shards(tables, shards=shards, memory_bytes=memory, lookups_per_request=lookups)
    except ValueError:
        # Tables are cut at whole rows and columns: what that rounds up may be what does not fit.
        rounding = sum(max(4 * table.rows, 4 * table.dim) for table in tables)
        assert memory * shards < held_bytes(tables) + shards * rounding
        return
    assert_covers(plan, tables)
    assert max(plan.held_bytes) <= memory
    assert sum(plan.held_bytes) == held_bytes(tables)


def all_plans(tables: Sequence[Table], lookups: dict[str, float], shards: int, memory: int) -> Iterator[float]:
    """The fullest shard's read bytes of every plan that fits: all numbers of equal cuts, all placements."""
    for parts in itertools.product(range(1, shards + 1), repeat=len(tables)):
        costs = []
        for table, count in zip(tables, parts, strict=True):
            for piece in cut_table(table, count, pooled=True):
                nbytes = row_bytes(piece.columns, "float32")
                ids = lookups[table.name] * piece.rows / table.rows
                costs.append((ids * -(-nbytes // LINE_BYTES) * LINE_BYTES + PIECE_BYTES, piece.rows * nbytes))
        for placement in itertools.product(range(shards), repeat=len(costs)):
            read, held = [0.0] * shards, [0] * shards
            for shard, (reading, holding) in zip(placement, costs, strict=True):
                read[shard] += reading
                held[shard] += holding
            if max(held) <= memory:
                yield max(read)


@settings(max_examples=40)
@given(problem=problems(most=3), spare=st.floats(1.1, 3.0))
def test_plans_come_near_the_best(problem: tuple[list[Table], dict[str, float]], spare: float):
    """On two shards the fullest one reads at most 4/3 of what the best of all plans would have it read."""
    tables, lookups = problem
    memory = int(held_bytes(tables) / 2 * spare)
    pooled = frozenset(lookups)
    best = min(all_plans(tables, lookups, 2, memory), default=None)
    if best is None:
        return
    plan = plan_shards(tables, shards=2, memory_bytes=memory, lookups_per_request=lookups, pooled=pooled)
    assert max(plan.read_bytes) <= best * 4 / 3 + 1


def test_one_heavy_table_is_cut():
    """A table that is half of all reading does not stay on one of four shards, and all read nearly the same."""
    tables = [Table(name=f"t{index}", rows=1000, dim=64) for index in range(7)]
    lookups = {"t0": 6000.0, **{f"t{index}": 1000.0 for index in range(1, 7)}}
    plan = plan_shards(tables, shards=4, memory_bytes=1 << 20, lookups_per_request=lookups)
    assert len({piece.shard for piece in plan.of_table("t0")}) > 1
    assert max(plan.read_bytes) <= 1.1 * sum(plan.read_bytes) / 4


def test_whole_tables_stay_whole_where_that_is_even():
    """What whole tables balance is not cut: a piece costs dispatch, and cut rows move bits."""
    tables = [Table(name=f"t{index}", rows=1000, dim=64) for index in range(8)]
    plan = plan_shards(tables, shards=4, memory_bytes=1 << 20, lookups_per_request=dict.fromkeys("t0", 0.0))
    assert [len(plan.of_table(table.name)) for table in tables] == [1] * 8
    assert len(set(plan.held_bytes)) == 1


def test_narrow_tables_and_those_of_single_rows_are_cut_by_rows():
    """A cut by columns keeps a cache line per piece and pays for pooled tables; all others are cut by rows."""
    wide, narrow = Table(name="wide", rows=10, dim=32), Table(name="narrow", rows=10, dim=16)
    assert [(piece.rows, piece.columns) for piece in cut_table(wide, 2, pooled=True)] == [(10, 16), (10, 16)]
    assert [(piece.rows, piece.columns) for piece in cut_table(wide, 2, pooled=False)] == [(5, 32), (5, 32)]
    assert [(piece.rows, piece.columns) for piece in cut_table(narrow, 3, pooled=True)] == [(3, 16), (3, 16), (4, 16)]
    assert len(cut_table(Table(name="tiny", rows=2, dim=4), 3, pooled=True)) == 2


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    shards=st.integers(1, 4),
    row_format=st.sampled_from(("float32", "float16", "int8")),
    pooled=st.sets(st.sampled_from(("t0", "t1", "t3"))),
)
def test_a_plan_answers_with_the_bits_of_one_process(
    data: st.DataObject, shards: int, row_format: RowFormat, pooled: set[str]
):
    """Tables spread by a plan, in any format, split by columns or rows, give the bits of tables in one process."""
    weights = make_weights(shapes=[(40, 32), (17, 48), (5, 4), (90, 16)])
    tables = [Table(name=name, rows=weight.shape[0], dim=weight.shape[1]) for name, weight in weights.items()]
    lookups = {"t0": 2000.0, "t3": 4000.0}
    plan = plan_shards(
        tables, shards=shards, memory_bytes=1 << 20, lookups_per_request=lookups, pooled=frozenset(pooled)
    )
    wanted = data.draw(asks(weights))
    held = [LocalShard(one) for one in held_by(plan, weights, row_format)]
    values = joined(tables, plan, held, row_format).lookup(wanted)
    twins = FusedTables(stored(weights, formats=row_format)).lookup(wanted)
    assert all(torch.equal(value, twin) for value, twin in zip(values, twins, strict=True))
