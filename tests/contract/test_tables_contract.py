"""What every implementation of `Tables` promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait_disagg.tables.protocols import BadId, Tables
from plait_disagg.tables.reference import SeparateTables
from plait_disagg.tables.values import OutOfRange
from support.fabric_rows import merged, reach, shard
from support.tables import MODES, Weights, asks, fused, make_ask, make_weights, separate, sharded

_kept: dict[tuple[int, OutOfRange], Tables] = {}


def sharded_remote(weights: Weights, out_of_range: OutOfRange, folder: Path) -> Tables:
    """The tables at two shards. Workers for each set of weights live as long as the process."""
    key = (id(weights), out_of_range)
    if key not in _kept:
        workers = [shard(number, weights=weights) for number in range(2)]
        shards = [reach(number, worker, weights=weights) for number, worker in enumerate(workers)]
        _kept[key] = merged(shards, weights=weights, out_of_range=out_of_range)
    return _kept[key]


Build = Callable[[Weights, OutOfRange, Path], Tables]

BUILDS: dict[str, Build] = {
    "separate": separate,
    "fused": fused,
    "sharded whole": sharded(1, 2),
    "sharded in two": sharded(2, 2),
    "sharded in three": sharded(3, 2),
    "sharded by rows": sharded(3, 2, pooled=False),
    "remote shards": sharded_remote,
}

WEIGHTS = make_weights()
SETTINGS = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest) -> str:
    """The name of one implementation after the other."""
    return str(request.param)


def same(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The same bits."""
    return value.dtype == torch.float32 and torch.equal(value, wanted)


@SETTINGS
@given(data=st.data())
def test_answers_equal_the_naive_twin(build: str, data: st.DataObject, tmp_path: Path):
    """Any mix of lookups, empty bags and repeated ids included, gives the naive twin's answers in order."""
    wanted = data.draw(asks(WEIGHTS))
    values = BUILDS[build](WEIGHTS, "error", tmp_path).lookup(wanted)
    twins = SeparateTables(WEIGHTS).lookup(wanted)
    assert len(values) == len(wanted)
    assert all(same(value, twin) for value, twin in zip(values, twins, strict=True))


@SETTINGS
@given(data=st.data(), policy=st.sampled_from(("clip", "hash")))
def test_ids_outside_follow_the_policy(build: str, data: st.DataObject, policy: OutOfRange, tmp_path: Path):
    """Ids of any 64 bits are taken into the table as the naive twin takes them, and those inside are untouched."""
    wanted = data.draw(asks(WEIGHTS, outside=True))
    values = BUILDS[build](WEIGHTS, policy, tmp_path).lookup(wanted)
    twins = SeparateTables(WEIGHTS, policy).lookup(wanted)
    assert all(same(value, twin) for value, twin in zip(values, twins, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [-1, 19, 2**40, -(2**63), 2**63 - 1])
def test_a_bad_id_names_table_value_and_position(build: str, mode: str, bad: int, tmp_path: Path):
    """With policy error an id outside is refused, and the refusal says which."""
    tables = BUILDS[build](WEIGHTS, "error", tmp_path)
    good, wrong = make_ask("t0", "sum", [[1]]), make_ask("t1", mode, [[18, 0], [bad, 3]])
    with pytest.raises(BadId, match=r"t1.*outside 0\.\.18") as refused:
        tables.lookup([good, wrong])
    assert (refused.value.table, refused.value.value, refused.value.position) == ("t1", bad, 2)
    assert len(tables.lookup([good])) == 1, "still usable"


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_empty_bags_are_zeros(build: str, mode: str, tmp_path: Path):
    """A bag without ids is zeros in every mode, also when all bags are empty and when there is no bag."""
    tables = BUILDS[build](WEIGHTS, "error", tmp_path)
    some, empty, none = tables.lookup([make_ask("t2", mode, bags) for bags in ([[], [2], []], [[], []], [])])
    assert torch.equal(some[[0, 2]], torch.zeros(2, 5))
    assert torch.equal(empty, torch.zeros(2, 5))
    assert none.shape == (0, 5)


def test_no_asks_no_answers(build: str, tmp_path: Path):
    """A batch without lookups is answered with nothing."""
    assert BUILDS[build](WEIGHTS, "error", tmp_path).lookup([]) == []
