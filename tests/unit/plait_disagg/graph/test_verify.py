"""The check that runs when a model is packaged: it passes for true halves and says what is wrong with false ones."""

from __future__ import annotations

import torch

from plait_disagg.graph.costs import cut_problem
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.edit import reads
from plait_disagg.graph.sample_inputs import id_bounds
from plait_disagg.graph.split import split
from plait_disagg.graph.tile import keeps_bits, tile
from plait_disagg.graph.verify import verify_halves
from support.graph import OneByOne, model, table_rows


def verified(name, *, exact, tables=None, constants=None, **options):
    module, captured = model(name)
    program = tile(captured.program, exact=exact)
    problem = cut_problem(program, dict.fromkeys(reads(program), 1e-5), candidates=8, ids_per_bag={})
    halves = split(program, CUTTERS["mincut"].cut(problem))
    return verify_halves(
        module,
        captured.inputs,
        halves,
        constants=constants or captured.constants,
        tables=OneByOne(tables or captured.tables),
        bounds=id_bounds(program, table_rows(captured)),
        bits_promised=exact and keeps_bits(program),
        **options,
    )


def test_true_halves_pass_and_single_requests_have_the_modules_bits():
    """All promises kept: bits alone, 1e-5 in company."""
    for name in ("small", "zoo", "weighted"):
        exact = verified(name, exact=True)
        assert exact.ok, exact.failures
        assert exact.bits_promised == (name != "weighted")
        if exact.bits_promised:
            assert all(check.equal_bits for check in exact.checks if len(check.candidates) == 1)
        assert verified(name, exact=False).ok


def test_a_wrong_constant_is_found():
    """A weight that is not the module's shows as outputs that differ, with the size of the difference."""
    _, captured = model("small")
    wrong = {name: tensor + 0.1 if name == "top.2.bias" else tensor for name, tensor in captured.constants.items()}
    found = verified("small", exact=True, constants=wrong)
    assert not found.ok
    assert "outputs differ by" in found.failures[0]


def test_rounded_rows_fail_the_promise_of_bits_and_pass_a_wider_tolerance():
    """Tables in half precision are not the module's: the caller says how far off they may be."""
    _, captured = model("small")
    rounded = {name: table.half().float() for name, table in captured.tables.items()}
    assert not verified("small", exact=True, tables=rounded).ok
    assert verified("small", exact=False, tables=rounded, rtol=1e-2, ulps=1e5).ok


def test_a_changed_order_of_the_best_is_found():
    """Scores within the tolerance but with the best candidates swapped beyond it are a failure of their own."""
    found = verified("small", exact=False, rtol=1e-9, ulps=0.0)
    assert all(torch.isfinite(torch.tensor(check.max_absolute)) for check in found.checks)
    assert all(check.same_top for check in verified("small", exact=False).checks)
