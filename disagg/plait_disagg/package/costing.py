"""Preparing a captured program for the cutters, and measuring what its parts cost on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from plait_disagg.graph import costs
from plait_disagg.graph.costs import CutProblem
from plait_disagg.graph.factor import factor_linears
from plait_disagg.graph.inputs import Input
from plait_disagg.graph.interaction import split_interactions
from plait_disagg.graph.program import USER_OF, Program
from plait_disagg.graph.sample_inputs import id_bounds, sample
from plait_disagg.graph.small_tables import offer
from plait_disagg.graph.tile import tile
from plait_disagg.tables.protocols import Tables


@dataclass(frozen=True, kw_only=True)
class Cuttable:
    """A tiled program with its constants. `bounds`: ids of an input are below its bound. `table_rows`: of the tables
    that an HN may hold if they are small."""

    program: Program
    constants: Mapping[str, torch.Tensor]
    inputs: Sequence[Input]
    bounds: Mapping[str, int]
    table_rows: Mapping[str, int]


def cuttable(
    captured: Program,
    constants: Mapping[str, torch.Tensor],
    inputs: Sequence[Input],
    *,
    table_rows: Mapping[str, int],
    exact: bool,
    may_move: Mapping[str, int] | None = None,
) -> Cuttable:
    """Make a captured program as cheap as possible before it is cut. `may_move`: rows of the tables that an HN may
    hold if they are small, which are those that reject an id outside; None: all.

    The user's values, dot products and share of linear layers are computed once per user; with `exact`, only as far
    as results stay bit-exact.
    """
    program, bounds = tile(captured, exact=exact), id_bounds(captured, table_rows, constants)
    if not exact:
        program, constants = factor_linears(*split_interactions(program, constants))
    held = table_rows if may_move is None else may_move
    return Cuttable(program=program, constants=constants, inputs=inputs, bounds=bounds, table_rows=held)


def cut_problem(ready: Cuttable, tables: Tables, *, candidates: int, ids_per_bag: Mapping[str, int]) -> CutProblem:
    """Build the problem for the cutters: the cost of every part for one random request, measured on one thread. Its
    program offers the lookups of small tables (`graph.small_tables`)."""
    program = offered(ready, candidates=candidates, ids_per_bag=ids_per_bag)
    tensors = sample(ready.inputs, ready.bounds, candidates=candidates, ids_per_bag=ids_per_bag)
    tensors[USER_OF] = torch.zeros(candidates, dtype=torch.int64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = costs.measure_seconds(program, ready.constants, tables, tensors)
    finally:
        torch.set_num_threads(threads)
    return costs.cut_problem(program, seconds, candidates=candidates, ids_per_bag=ids_per_bag)


def offered(ready: Cuttable, *, candidates: int, ids_per_bag: Mapping[str, int]) -> Program:
    """Return the program with the lookups marked that may run on the HN for a request of that size."""
    nbytes = costs.value_bytes(ready.program, candidates=candidates, ids_per_bag=ids_per_bag)
    return offer(ready.program, ready.table_rows, nbytes)
