"""What every implementation of `Tables` promises."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.protocols import BadId, Tables
from plait_disagg.tables.reference import SeparateTables
from plait_disagg.tables.values import OutOfRange
from support.fabric_rows import merged, reach, records, shard
from support.tables import MODES, LocalShard, asks, deal, held_by, joined, make_ask, make_weights, stored

WEIGHTS = make_weights()

Build = Callable[[OutOfRange], Tables]


def sharded(parts: int, *, pooled: bool = True) -> Build:
    """Every table in ``parts`` pieces, dealt to two shards: wide tables are cut by columns if they are ``pooled``,
    others by rows."""

    def build(out_of_range: OutOfRange) -> Tables:
        tables = records(WEIGHTS, out_of_range)
        plan = deal(tables, parts, 2, pooled=pooled)
        return joined(tables, plan, [LocalShard(held) for held in held_by(plan, WEIGHTS)])

    return build


@cache
def sharded_remote(out_of_range: OutOfRange) -> Tables:
    """The tables at two shards, whose workers live as long as the process."""
    shards = [reach(number, shard(number, weights=WEIGHTS), weights=WEIGHTS) for number in range(2)]
    return merged(shards, weights=WEIGHTS, out_of_range=out_of_range)


BUILDS: dict[str, Build] = {
    "separate": lambda out_of_range: SeparateTables(WEIGHTS, out_of_range),
    "fused": lambda out_of_range: FusedTables(stored(WEIGHTS, out_of_range=out_of_range)),
    "sharded whole": sharded(1),
    "sharded in three": sharded(3),
    "sharded by rows": sharded(3, pooled=False),
    "remote shards": sharded_remote,
}

of_every_kind = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


@of_every_kind
@settings(max_examples=24)
@given(data=st.data(), policy=st.sampled_from(("error", "clip", "hash")))
def test_answers_equal_the_naive_twin(build: Build, data: st.DataObject, policy: OutOfRange):
    """Any mix of lookups, empty bags and repeated ids included, gives the naive twin's bits in order; ids of any 64
    bits are taken into the table as its policy says."""
    wanted = data.draw(asks(WEIGHTS, outside=policy != "error"))
    twins = SeparateTables(WEIGHTS, policy).lookup(wanted)
    for value, twin in zip(build(policy).lookup(wanted), twins, strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(value, twin)


@of_every_kind
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [-1, 19, -(2**63), 2**63 - 1])
def test_a_bad_id_names_table_value_and_position(build: Build, mode: str, bad: int):
    """With policy error an id outside is refused, and the refusal says which."""
    tables = build("error")
    good, wrong = make_ask("t0", "sum", [[1]]), make_ask("t1", mode, [[18, 0], [bad, 3]])
    with pytest.raises(BadId, match=r"t1.*outside 0\.\.18") as refused:
        tables.lookup([good, wrong])
    assert (refused.value.table, refused.value.value, refused.value.position) == ("t1", bad, 2)
    assert len(tables.lookup([good])) == 1, "still usable"
