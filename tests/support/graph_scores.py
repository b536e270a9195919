"""What a captured module and the module itself make of one random request."""

from __future__ import annotations

import torch
from torch import nn

from plait_disagg.graph.capture import capture
from plait_disagg.graph.execute import compile_program
from plait_disagg.graph.sample_inputs import collate, for_module, id_bounds, sample
from plait_disagg.tables.reference import SeparateTables
from support.closeness import EQUAL, ulps


def scorer(module: nn.Module, inputs, *, bounds=None):
    """Capture the module, once; `score(candidates, seed)` returns the program's scores and the module's. `bounds`: ids
    are below them instead of below the tables' rows."""
    captured = capture(module, inputs)
    rows = {name: int(table.shape[0]) for name, table in captured.tables.items()}
    bounds = bounds or id_bounds(captured.program, rows, captured.constants)
    run = compile_program(captured.program, captured.constants, SeparateTables(captured.tables))

    def score(candidates: int, seed: int):
        request = sample(inputs, bounds, candidates=candidates, seed=seed, ids_per_bag=4, ragged=True)
        batch = collate(inputs, [request], [candidates])
        expanded = for_module(inputs, batch)
        with torch.no_grad():
            return run({**expanded, "user_of": batch["user_of"]})["score"], module(**expanded)

    return score


def scores(module: nn.Module, inputs, *, candidates: int, seed: int, bounds=None):
    """Return what `scorer` makes of one request."""
    return scorer(module, inputs, bounds=bounds)(candidates, seed)


def assert_same_scores(module: nn.Module, inputs) -> None:
    """Check that a program scores as the module does, on other numbers of rows than it was traced with."""
    score = scorer(module, inputs)
    for seed, candidates in enumerate((2, 9, 41, 64)):
        got, wanted = score(candidates, seed)
        assert ulps(got, wanted) <= EQUAL
