"""What crosses the cut for one request, by cutter and configuration; also with a row per candidate for every value.

Bytes are counted, not measured on a wire, so one round suffices. Which cut is best depends on the operators'
measured times on this CPU and on a model of the GPU's (`plait_disagg.graph.costs.HnModel`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload
from plait_bench.disagg.load.packages import SEED
from plait_disagg.graph.capture import Captured, capture
from plait_disagg.graph.cut import CutProblem, cost_of
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.models.configs import CONFIGS, build, ids_per_bag
from plait_disagg.package.costing import cut_problem, cuttable
from plait_disagg.tables.reference import SeparateTables

__all__ = ["CANDIDATES", "METRIC", "Crossing"]

CANDIDATES = (1, 64, 512)
METRIC = "crossing_bytes"
UNTILED = "mincut_untiled"

_TINY = 1e-4
"""The scale applied to the published row counts: what crosses depends on widths, not on rows."""


class Crossing(Workload):
    """For each configuration and number of candidates: bytes, modelled seconds and cutting time of each cutter, and the
    bytes when every value has a row per candidate."""

    name = "crossing"
    systems = (*CUTTERS, UNTILED)
    rounds: ClassVar[Mapping[str, int]] = dict.fromkeys(systems, 1)
    metrics: Mapping[str, Metric] = {
        METRIC: Metric(unit="bytes", better="lower"),
        "cut_s": Metric(unit="s", better="lower"),
        "request_s": Metric(unit="s", better="lower"),
    }

    def __init__(self, models: Sequence[str] = tuple(CONFIGS)) -> None:
        self._models = models

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Capture all models, unchanged and with all inputs on the item side."""
        self.captured: dict[str, tuple[Captured, Captured]] = {}
        for model in self._models:
            say(f"cutting {model}")
            module, inputs = build(model, rows_scale=_TINY, seed=SEED)
            flat = capture(module, [replace(item, side="item") for item in inputs])
            self.captured[model] = capture(module, inputs), flat
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open a cutter."""
        yield _Cutting(self, system)


@dataclass(frozen=True)
class _Cutting:
    """Implements `Subject`."""

    workload: Crossing
    system: str

    def warm_up(self) -> None:
        """Do nothing: bytes are the same when cold."""

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        return [
            reading
            for model, (user_once, flat) in self.workload.captured.items()
            for candidates in CANDIDATES
            for reading in self._readings(model, candidates, flat if self.system == UNTILED else user_once)
        ]

    def _readings(self, model: str, candidates: int, captured: Captured) -> Iterator[Reading]:
        name = f"{model}-{candidates}"
        problem = _problem(model, candidates, captured)
        started_s = time.perf_counter()
        cut = CUTTERS["mincut" if self.system == UNTILED else self.system].cut(problem)
        taken_s = time.perf_counter() - started_s
        cost = cost_of(problem, cut)
        yield Reading(workload=name, metric=METRIC, value=float(cost.crossing_bytes))
        if self.system != UNTILED:
            yield Reading(workload=name, metric="cut_s", value=taken_s)
            yield Reading(workload=name, metric="request_s", value=cost.total_s, kind="modelled")


def _problem(model: str, candidates: int, captured: Captured) -> CutProblem:
    rows_of = {name: int(weight.shape[0]) for name, weight in captured.tables.items()}
    ready = cuttable(captured.program, captured.constants, captured.inputs, table_rows=rows_of, exact=False)
    tables = SeparateTables(captured.tables)
    return cut_problem(ready, tables, candidates=candidates, ids_per_bag=ids_per_bag(model))
