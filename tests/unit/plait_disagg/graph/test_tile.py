"""User-side values keep one row per user; where the tiles stand; what crosses because of it."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.execute import compile_program, stages, tile_rows
from plait_disagg.graph.sample_inputs import collate, id_bounds, sample
from plait_disagg.graph.tile import keeps_bits, tile
from plait_disagg.tables.reference import SeparateTables
from support.graph import model, table_rows


@pytest.mark.parametrize(("name", "kept"), [("small", True), ("zoo", True), ("weighted", False)])
def test_it_is_known_which_programs_keep_the_modules_bits(name, kept):
    """Exact ones do, but for a user's bag with weights of its own; a tiled one rounds once per user and does not."""
    _, captured = model(name)
    assert keeps_bits(tile(captured.program, exact=True)) == kept
    assert not keeps_bits(tile(captured.program))


def test_a_tiled_row_is_copied_only_where_it_must_be():
    """One user: a view of the single row. Several users: the row that belongs to each candidate."""
    x = torch.randn(1, 3)
    view = tile_rows(x, torch.zeros(5, dtype=torch.int64))
    assert view.shape == (5, 3)
    assert view.data_ptr() == x.data_ptr()
    assert tile_rows(x, torch.zeros(5, dtype=torch.int64), copy=True).data_ptr() != x.data_ptr()
    many = torch.randn(2, 3)
    assert torch.equal(tile_rows(many, torch.tensor([0, 1, 1])), many[[0, 1, 1]])


def test_all_lookups_that_are_ready_are_one_call():
    """Tables see one call with every ask of a request, so that they can serve them as one."""
    _, captured = model("small")
    program = tile(captured.program)
    assert [len(lookups) for _, lookups in stages(program)] == [4, 0]
    tables = SeparateTables(captured.tables)
    bounds = id_bounds(program, table_rows(captured))
    batch = collate(captured.inputs, [sample(captured.inputs, bounds, candidates=3)], [3])
    with patch.object(tables, "lookup", wraps=tables.lookup) as lookup:
        compile_program(program, captured.constants, tables)(batch)
    assert [len(call.args[0]) for call in lookup.call_args_list] == [4]


def test_a_program_without_its_constants_or_tables_does_not_start():
    """What is missing or does not fit is said before the first request."""
    _, captured = model("small")
    program = tile(captured.program)
    tables = SeparateTables(captured.tables)
    missing = {name: tensor for name, tensor in captured.constants.items() if name != "top.2.bias"}
    with pytest.raises(BadProgram, match=r"top\.2\.bias is missing"):
        compile_program(program, missing, tables)
    with pytest.raises(BadProgram, match=r"top\.2\.bias is torch\.float64"):
        compile_program(program, {**missing, "top.2.bias": torch.zeros(1, dtype=torch.float64)}, tables)
    with pytest.raises(BadProgram, match="no tables"):
        compile_program(program, captured.constants)
