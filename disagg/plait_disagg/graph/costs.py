"""A captured program made as cheap as possible, and what its parts cost: the bytes of every value and the seconds of
every operator, measured by running it.

A cut is the set of nodes that run on the CN, and costs

    sum of CN times + sum of HN times + crossing bytes / link rate

A value that crosses is paid for once, however many nodes read it. The way back of the answer costs the same for
every cut and is left out.

The CN's seconds are measured, on one thread. The HN's are *modelled* from them (`hn_seconds`), and every number that
depends on them is marked as such.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

import torch

from plait_disagg.graph.edit import flat_values
from plait_disagg.graph.execute import run_reference
from plait_disagg.graph.factor import factor_linears
from plait_disagg.graph.inputs import OFFSETS, Input
from plait_disagg.graph.interaction import split_interactions
from plait_disagg.graph.operators import SIZE, Kind, kind_of
from plait_disagg.graph.program import LOOKUP, ROWS, USER_OF, Node, Port, Program
from plait_disagg.graph.sample_inputs import id_bounds, sample
from plait_disagg.graph.small_tables import is_bound, offer
from plait_disagg.graph.tile import tile
from plait_disagg.tables.protocols import Tables

LINK_BYTES_PER_S = 12.4e9
"""The bandwidth of a 100 Gbit/s RDMA link in one direction (as perftest measures it). Modelled."""

_SPEEDUP: Mapping[Kind, float] = {"gemm": 100.0, "attention": 100.0, "lookup": 1.0}
_SPEEDUP_OF_OTHERS = 20.0

_FLOOR_S = 1e-6
"""The cost of a kernel replayed from a graph."""


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


@dataclass(frozen=True, kw_only=True)
class CutProblem:
    """A tiled program and what its parts cost for one request of `candidates`.

    `value_bytes`: bytes of every input and node result. `cn_s`, `hn_s`: seconds of every node on either side.
    """

    program: Program
    value_bytes: Mapping[str, int]
    cn_s: Mapping[str, float]
    hn_s: Mapping[str, float]
    link_bytes_per_s: float


def hn_seconds(program: Program, cn_s: Mapping[str, float]) -> dict[str, float]:
    """Return the modelled seconds on the HN by node name: the CN's divided by the speed-up of the operator's kind, but
    at least `_FLOOR_S`.

    The numbers are our assumptions about one data-centre GPU against one CPU core at the sizes of one request, far
    below the saturated ratio (MLPerf dlrm-v2: 19.75 M pairs/s on an H200, 20.5 k on a core).
    """
    nodes = [node for node in program.nodes if node.op != SIZE]
    kinds = {node.name: kind_of(node.op) if node.op != LOOKUP or is_bound(node) else "layout" for node in nodes}
    return {name: max(_FLOOR_S, cn_s[name] / _SPEEDUP.get(kind, _SPEEDUP_OF_OTHERS)) for name, kind in kinds.items()}


def value_bytes(program: Program, *, candidates: int, ids_per_bag: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of every input and result of a tiled program, for one request.

    `ids_per_bag`: ids in one row of each bag (1 for a bag that is not named).
    """
    flat = flat_values(program)
    offsets = {name + OFFSETS for name in flat}
    found = {}
    values: list[Port | Node] = [*program.inputs, *(node for node in program.nodes if node.op != SIZE)]
    for value in values:
        count = 1 if value.rows == "user" else candidates
        if value.name in flat:
            count *= ids_per_bag.get(flat[value.name], 1)
        elif value.name in offsets:
            count += 1
        sizes = [count if size == ROWS else size for size in value.shape]
        item_bytes: int = getattr(torch, value.dtype).itemsize
        found[value.name] = prod(sizes) * item_bytes
    return found


def measure_seconds(
    program: Program,
    constants: Mapping[str, torch.Tensor],
    tables: Tables | None,
    tensors: Mapping[str, torch.Tensor],
    *,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Measure the median seconds of every operator on its own, on the CPU."""
    seconds: dict[str, float] = {}

    def watch(node: Node, compute: Callable[[], Any]) -> Any:
        made, taken = compute(), []
        for _ in range(repeats):
            start = clock()
            compute()
            taken.append(clock() - start)
        seconds[node.name] = median(taken)
        return made

    run_reference(program, constants, tables, tensors, watch)
    return seconds


def cut_problem(
    program: Program, cn_s: Mapping[str, float], *, candidates: int, ids_per_bag: Mapping[str, int]
) -> CutProblem:
    """Build the problem for the cutters, with modelled seconds of the HN."""
    return CutProblem(
        program=program,
        value_bytes=value_bytes(program, candidates=candidates, ids_per_bag=ids_per_bag),
        cn_s=cn_s,
        hn_s=hn_seconds(program, cn_s),
        link_bytes_per_s=LINK_BYTES_PER_S,
    )


def measured_problem(ready: Cuttable, tables: Tables, *, candidates: int, ids_per_bag: Mapping[str, int]) -> CutProblem:
    """Build the problem for the cutters: the cost of every part for one random request, measured on one thread. Its
    program offers the lookups of small tables (`graph.small_tables`)."""
    program = offered(ready, candidates=candidates, ids_per_bag=ids_per_bag)
    tensors = sample(ready.inputs, ready.bounds, candidates=candidates, ids_per_bag=ids_per_bag)
    tensors[USER_OF] = torch.zeros(candidates, dtype=torch.int64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = measure_seconds(program, ready.constants, tables, tensors)
    finally:
        torch.set_num_threads(threads)
    return cut_problem(program, seconds, candidates=candidates, ids_per_bag=ids_per_bag)


def offered(ready: Cuttable, *, candidates: int, ids_per_bag: Mapping[str, int]) -> Program:
    """Return the program with the lookups marked that may run on the HN for a request of that size."""
    nbytes = value_bytes(ready.program, candidates=candidates, ids_per_bag=ids_per_bag)
    return offer(ready.program, ready.table_rows, nbytes)
