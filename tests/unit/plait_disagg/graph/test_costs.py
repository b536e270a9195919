"""Bytes by arithmetic against bytes that were there; seconds by a clock of our own."""

from __future__ import annotations

import itertools

import pytest

from plait_disagg.graph.costs import measure_seconds, value_bytes
from plait_disagg.graph.edit import reads
from plait_disagg.graph.errors import BadCut
from plait_disagg.graph.execute import run_reference
from plait_disagg.graph.sample_inputs import collate, id_bounds, sample
from plait_disagg.graph.split import check_cut
from plait_disagg.graph.tile import tile
from plait_disagg.tables.reference import SeparateTables
from support.graph import model, table_rows


@pytest.mark.parametrize("name", ["small", "zoo"])
@pytest.mark.parametrize("candidates", [1, 7])
def test_bytes_by_arithmetic_are_the_bytes_of_real_values(name, candidates):
    """`value_bytes` knows the size of every value of a request without running it."""
    _, captured = model(name)
    program = tile(captured.program)
    bounds = id_bounds(program, table_rows(captured))
    request = sample(captured.inputs, bounds, candidates=candidates, ids_per_bag=4)
    batch = collate(captured.inputs, [request], [candidates])
    values = run_reference(program, captured.constants, SeparateTables(captured.tables), batch)
    per_bag = dict.fromkeys(("history", "tags", "clicks"), 4)
    for value, nbytes in value_bytes(program, candidates=candidates, ids_per_bag=per_bag).items():
        assert nbytes == values[value].numel() * values[value].element_size(), value


def test_seconds_are_medians_of_what_the_clock_said():
    """With a clock that ticks 1, 2, 3, ... every repeat takes one second."""
    _, captured = model("small")
    program = tile(captured.program)
    bounds = id_bounds(program, table_rows(captured))
    batch = collate(captured.inputs, [sample(captured.inputs, bounds, candidates=2)], [2])
    ticks = itertools.count()
    seconds = measure_seconds(
        program, captured.constants, SeparateTables(captured.tables), batch, repeats=3, clock=lambda: float(next(ticks))
    )
    assert set(seconds) >= set(reads(program))
    assert set(seconds.values()) == {1.0}


def test_what_a_cut_may_not_do_is_an_error_that_names_it():
    """A lookup on the HN, a value that flows back, and a name that is no node are refused."""
    _, captured = model("small")
    program = tile(captured.program)
    everything = frozenset(reads(program))
    for chosen, text in (
        (everything - {"history_2"}, "history_2"),
        (everything - {"linear"}, "relu"),
        (everything | {"nothing"}, "nothing"),
    ):
        with pytest.raises(BadCut, match=text):
            check_cut(program, chosen)
    check_cut(program, everything)
