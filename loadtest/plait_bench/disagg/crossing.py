"""What crosses the cut for one request: both cutters, every configuration; beside it the same with nothing tiled.

Bytes are counted, not measured on a wire. Which cut is best depends on the operators' measured times on this CPU and on
a model of the GPU's (`plait_disagg.graph.costs.HnModel`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from plait_bench.benchmark import ResultRow
from plait_bench.disagg.packages import SEED
from plait_disagg.graph.capture import Captured, capture
from plait_disagg.graph.cut import CutProblem, cost_of
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.inputs import Input
from plait_disagg.models.configs import CONFIGS, build, ids_per_bag
from plait_disagg.package.costing import cut_problem, cuttable
from plait_disagg.tables.reference import SeparateTables

__all__ = ["CANDIDATES", "METRIC", "rows"]

CANDIDATES = (1, 64, 512)
METRIC = "crossing_bytes"

_METRICS = {METRIC: ("bytes", "measured"), "cut_s": ("s", "measured"), "request_s": ("s", "modelled")}

_TINY = 1e-4
"""Of the published rows: widths decide what crosses, not rows."""


def rows(*, say: Callable[[str], None], models: Sequence[str] = tuple(CONFIGS)) -> list[ResultRow]:
    """For each configuration and number of candidates: bytes, modelled seconds and cutting time of each cutter, and the
    bytes when every value has a row per candidate."""
    made: list[ResultRow] = []
    for model in models:
        say(f"cutting {model}")
        module, inputs = build(model, rows_scale=_TINY, seed=SEED)
        user_once = capture(module, inputs)
        flat = capture(module, [_item_side(item) for item in inputs])
        for candidates in CANDIDATES:
            made += _rows(model, candidates, user_once, flat)
    return made


def _rows(model: str, candidates: int, user_once: Captured, flat: Captured) -> Iterator[ResultRow]:
    row = partial(_row, f"{model}-{candidates}")
    problem = _problem(model, candidates, user_once)
    for name, cutter in CUTTERS.items():
        started_s = time.perf_counter()
        cut = cutter.cut(problem)
        taken_s = time.perf_counter() - started_s
        cost = cost_of(problem, cut)
        yield row(name, METRIC, float(cost.crossing_bytes))
        yield row(name, "cut_s", taken_s)
        yield row(name, "request_s", cost.total_s)
    untiled = _problem(model, candidates, flat)
    cost = cost_of(untiled, CUTTERS["mincut"].cut(untiled))
    yield row("mincut_untiled", METRIC, float(cost.crossing_bytes))


def _problem(model: str, candidates: int, captured: Captured) -> CutProblem:
    rows_of = {name: int(weight.shape[0]) for name, weight in captured.tables.items()}
    ready = cuttable(captured.program, captured.constants, captured.inputs, table_rows=rows_of, exact=False)
    tables = SeparateTables(captured.tables)
    return cut_problem(ready, tables, candidates=candidates, ids_per_bag=ids_per_bag(model))


def _item_side(item: Input) -> Input:
    return replace(item, side="item")


def _row(workload: str, system: str, metric: str, value: float) -> ResultRow:
    unit, kind = _METRICS[metric]
    return ResultRow(
        system=system, workload=workload, metric=metric, unit=unit, value=value, p20=value, p80=value, n=1, kind=kind
    )
