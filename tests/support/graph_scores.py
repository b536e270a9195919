"""What a captured module and the module itself make of one random request."""

from __future__ import annotations

import torch
from torch import nn

from plait_disagg.graph.capture import capture
from plait_disagg.graph.execute import compile_program
from plait_disagg.graph.sample_inputs import collate, for_module, id_bounds, sample
from plait_disagg.tables.reference import SeparateTables


def scores(module: nn.Module, inputs, *, candidates: int, seed: int, bounds=None):
    """Return the program's scores and the module's. `bounds`: ids are below them instead of below the tables' rows."""
    captured = capture(module, inputs)
    rows = {name: int(table.shape[0]) for name, table in captured.tables.items()}
    bounds = bounds or id_bounds(captured.program, rows, captured.constants)
    request = sample(inputs, bounds, candidates=candidates, seed=seed, ids_per_bag=4, ragged=True)
    batch = collate(inputs, [request], [candidates])
    expanded = for_module(inputs, batch)
    run = compile_program(captured.program, captured.constants, SeparateTables(captured.tables))
    with torch.no_grad():
        return run({**expanded, "user_of": batch["user_of"]})["score"], module(**expanded)


def assert_same_scores(module: nn.Module, inputs) -> None:
    """Check that a program scores as the module does, on other numbers of rows than it was traced with."""
    for seed, candidates in enumerate((2, 9, 41, 64)):
        got, wanted = scores(module, inputs, candidates=candidates, seed=seed)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
