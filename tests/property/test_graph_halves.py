"""The two halves against the module: bits for a single request through an exact program, 1e-5 through a tiled one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_disagg.graph.costs import cut_problem
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.edit import reads
from plait_disagg.graph.execute import compile_program
from plait_disagg.graph.factor import factor_linears
from plait_disagg.graph.sample_inputs import collate, id_bounds, sample
from plait_disagg.graph.split import split
from plait_disagg.graph.tile import tile
from plait_disagg.graph.verify import module_outputs, run_halves
from plait_disagg.models.configs import CONFIGS
from plait_disagg.tables.reference import SeparateTables
from support.graph import model, table_rows

candidate_counts = st.sampled_from([1, 2, 3, 8, 17, 512]) | st.integers(1, 40)


@cache
def halves_of(name, exact, cutter):
    """Compiled CN and HN programs of a model, cut with made-up costs."""
    _, captured = model(name)
    program, constants = tile(captured.program, exact=exact), captured.constants
    if not exact:
        program, constants = factor_linears(program, constants)
    cn_s = dict.fromkeys(reads(program), 1e-5)
    problem = cut_problem(program, cn_s, candidates=64, ids_per_bag={})
    halves = split(program, CUTTERS[cutter](problem))
    tables = SeparateTables(captured.tables)
    return compile_program(halves.cn, constants, tables), compile_program(halves.hn, constants)


def request_of(captured, candidates, seed, ids_per_bag=6):
    bounds = id_bounds(captured.program, table_rows(captured))
    return sample(captured.inputs, bounds, candidates=candidates, seed=seed, ids_per_bag=ids_per_bag, ragged=True)


@pytest.mark.parametrize("name", ["small", "zoo"])
@pytest.mark.parametrize("cutter", ["mincut", "prism"])
@settings(max_examples=6)
@given(candidates=candidate_counts, seed=st.integers(0, 10**6), ids_per_bag=st.integers(0, 9))
def test_exact_halves_give_the_modules_bits(name, cutter, candidates, seed, ids_per_bag):
    """One request, any number of candidates, bags that may be empty: bit for bit what the module gives."""
    module, captured = model(name)
    batch = collate(captured.inputs, [request_of(captured, candidates, seed, ids_per_bag)], [candidates])
    got = run_halves(*halves_of(name, True, cutter), batch)
    for output, wanted in module_outputs(module, captured.inputs, batch).items():
        assert torch.equal(got[output], wanted)


@pytest.mark.parametrize("name", ["small", "zoo", "weighted"])
@pytest.mark.parametrize("exact", [False, True])
@settings(max_examples=6)
@given(counts=st.lists(candidate_counts, min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_batched_requests_give_what_the_module_gives(name, exact, counts, seed):
    """Several requests as one batch, tiled or not: outputs within 1e-5, in the order of the candidates."""
    module, captured = model(name)
    requests = [request_of(captured, count, seed + index) for index, count in enumerate(counts)]
    batch = collate(captured.inputs, requests, counts)
    got = run_halves(*halves_of(name, exact, "mincut"), batch)
    for output, wanted in module_outputs(module, captured.inputs, batch).items():
        torch.testing.assert_close(got[output], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_configuration_cut_in_two_gives_the_modules_bits(name):
    """All published shapes: exact halves give the module's bits, tiled ones 1e-5 and the same order."""
    module, captured = model(name)
    for candidates in (1, 64):
        batch = collate(captured.inputs, [request_of(captured, candidates, 5)], [candidates])
        wanted = module_outputs(module, captured.inputs, batch)["score"]
        exact = run_halves(*halves_of(name, True, "mincut"), batch)["score"]
        tiled = run_halves(*halves_of(name, False, "prism"), batch)["score"]
        assert torch.equal(exact, wanted)
        torch.testing.assert_close(tiled, wanted, rtol=1e-5, atol=1e-6)
        best = wanted[tiled.argsort(descending=True)]
        torch.testing.assert_close(best, wanted.sort(descending=True).values, rtol=2e-5, atol=2e-6)
