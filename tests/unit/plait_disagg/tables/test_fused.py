"""What the fused lookup remembers between calls, what it refuses, and what it leaves alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.ids import hash_ids
from plait_disagg.tables.protocols import BadId, LookupBags, LookupRequest
from plait_disagg.tables.reference import SeparateTables
from support.tables import make_ask, make_weights, stored

WEIGHTS = make_weights()


def make_tables(**limits: int) -> FusedTables:
    """Over all weights, in float32."""
    return FusedTables(stored(WEIGHTS), **limits)


def assert_same(tables: FusedTables, asks: list[LookupRequest]) -> None:
    """The naive twin's bits."""
    for value, twin in zip(tables.lookup(asks), SeparateTables(WEIGHTS).lookup(asks), strict=True):
        assert torch.equal(value, twin)


@pytest.mark.parametrize("max_numbers", [2, 3000, 1 << 20])
def test_a_model_asks_again_and_again(max_numbers: int):
    """The same lookups with other ids, and other numbers of them, are answered right while layouts come and go, or are
    made each time."""
    tables, draw = make_tables(max_numbers=max_numbers), random.Random(0)
    lookups = [(table, mode) for table in ("t0", "t1", "t3") for mode in ("sum", "rows", "max")]
    for _ in range(60):
        bags = [[draw.randrange(7) for _ in range(draw.randrange(3))] for _ in range(draw.randrange(3))]
        assert_same(tables, [make_ask(table, mode, bags) for table, mode in lookups])


def test_lookups_are_told_apart_by_what_they_are():
    """Also where there are more kinds than are remembered."""
    tables, draw = make_tables(max_plans=4), random.Random(0)
    for _ in range(60):
        assert_same(tables, [make_ask(draw.choice(("t0", "t1", "t3")), draw.choice(("sum", "mean")), [[1, 2], [6]])])


@pytest.mark.parametrize("mode", ["sum", "rows"])
def test_asks_and_answers_are_the_callers(mode: str):
    """Ids and offsets, even those of one ask alone, are not shifted in place; an answer is not written over by a later
    lookup."""
    tables, ask = make_tables(), make_ask("t3", mode, [[5, 6], [7]])
    before = ask.ids.clone(), None if ask.offsets is None else ask.offsets.clone()
    first = tables.lookup([ask])[0]
    kept = first.clone()
    assert torch.equal(ask.ids, before[0])
    assert ask.offsets is None or torch.equal(ask.offsets, before[1])
    tables.lookup([make_ask("t3", mode, [[1, 2], [3]])])
    assert torch.equal(first, kept)


@pytest.mark.parametrize("requests", [1, 2, 5])
def test_bags_of_several_requests_are_pooled_where_they_lie(requests: int):
    """The bits of the naive twin over joined bags, empty ones among them, in every mode and any number of times."""
    tables, draw = make_tables(), random.Random(requests)
    for _ in range(20):
        drawn = [
            [
                [[draw.randrange(7) for _ in range(draw.randrange(3))] for _ in range(draw.randrange(4))]
                for _ in range(requests)
            ]
            for _ in range(4)
        ]
        kinds = list(zip(("t0", "t3", "t1", "t0"), ("sum", "mean", "sum", "max"), drawn, strict=True))
        joined = [make_ask(table, mode, [bag for bags in parts for bag in bags]) for table, mode, parts in kinds]
        separate = []
        for one, (table, mode, parts) in zip(joined, kinds, strict=True):
            asks = [make_ask(table, mode, bags) for bags in parts]
            ids, offsets = tuple(ask.ids for ask in asks), tuple(ask.offsets for ask in asks)
            separate.append(LookupBags(table=one.table, mode=one.mode, ids=ids, offsets=offsets))
        for value, twin in zip(tables.lookup_bags(separate), SeparateTables(WEIGHTS).lookup(joined), strict=True):
            assert torch.equal(value, twin)


def test_a_bad_id_of_a_later_request_is_named():
    """Where it stands in its own request, by the table's policy; offsets of each request are judged alone."""
    good, bad = make_ask("t1", "sum", [[1]]), make_ask("t1", "sum", [[1], [2, 19]])
    ids, offsets = (good.ids, bad.ids), (good.offsets, bad.offsets)
    with pytest.raises(BadId, match="id 19 at position 2"):
        make_tables().lookup_bags([LookupBags(table="t1", mode="sum", ids=ids, offsets=offsets)])
    for broken in (torch.tensor([0, 2]), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(ValueError, match="offsets"):
            parts = LookupBags(table="t1", mode="sum", ids=(good.ids, good.ids), offsets=(good.offsets, broken))
            make_tables().lookup_bags([parts])


GOOD = make_ask("t1", "sum", [[1, 2], [3]])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (replace(GOOD, offsets=None), "needs offsets"),
        (replace(GOOD, offsets=torch.tensor([], dtype=torch.int64)), "needs offsets"),
        (replace(GOOD, offsets=torch.tensor([0, 2, 4])), "offsets must go from 0"),
        (replace(GOOD, offsets=torch.tensor([1, 2, 3])), "offsets must go from 0"),
        (replace(GOOD, offsets=torch.tensor([3])), "offsets must go from 0"),
        (replace(GOOD, offsets=torch.tensor([0, -5, 3])), "must not fall"),
        (replace(GOOD, offsets=torch.tensor([0, 2**62, 2**63 - 1, 3])), "must not fall"),
        (replace(GOOD, offsets=torch.tensor([0, 5, 3])), "must not fall"),
        (replace(GOOD, ids=torch.tensor([1.0, 2.0, 3.0])), "int64 or int32"),
        (replace(GOOD, weights=torch.ones(2)), "one float32 per id"),
        (replace(GOOD, weights=torch.ones(3, dtype=torch.float64)), "one float32 per id"),
        (replace(make_ask("t1", "mean", [[1]]), weights=torch.ones(1)), "mode sum"),
        (replace(GOOD, table="nowhere"), "no table nowhere"),
    ],
)
def test_asks_that_do_not_fit_are_refused(bad: LookupRequest, says: str):
    """An ask that no checked request makes is refused by name, and the tables stay usable."""
    tables = make_tables()
    with pytest.raises(ValueError, match=says):
        tables.lookup([GOOD, bad])
    assert_same(tables, [GOOD])


def test_hashing_is_fixed():
    """The hash is part of a trained model: its values do not change. The first is the first output of SplitMix64 with
    seed 0, 0xE220A8397B1DCDAF, modulo 1,000."""
    assert hash_ids(torch.tensor([0, 1, -1, 2**63 - 1]).numpy(), 1000).tolist() == [535, 465, 936, 39]
