"""Ranking models, whole and cut in two, against plain PyTorch behind FastAPI and Ray Serve's own composition.

All systems hold the same weights, speak the same protocol and answer the same bodies; their scores are compared
first. The main metric is goodput (`workloads.goodput`). Also measured: what crosses the cut, what the cut costs, the
dense half alone, overload, refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plait_bench.benchmark import Benchmark, Workload, chosen
from plait_bench.disagg.workloads.big_table import BigTable
from plait_bench.disagg.workloads.crossing import Crossing
from plait_bench.disagg.workloads.dense import DENSE_MODELS, DenseOnly
from plait_bench.disagg.workloads.gathering import Gathering
from plait_bench.disagg.workloads.goodput import GOODPUTS, SCALES, Goodput
from plait_bench.disagg.workloads.in_process import InProcess
from plait_bench.disagg.workloads.one_by_one import OneByOne
from plait_bench.disagg.workloads.overload import Overload
from plait_bench.disagg.workloads.refresh import Refresh
from plait_bench.disagg.workloads.serve_one_by_one import ServeOneByOne

NAME = "disagg"

WORKLOADS: Mapping[str, Callable[[], Sequence[Workload]]] = {
    "crossing": lambda: [Crossing()],
    "table-20gb": lambda: [BigTable()],
    "serve-one-by-one": lambda: [ServeOneByOne()],
    "in-process": lambda: [InProcess(model, scale, count) for model, scale in SCALES.items() for count in (64, 512)],
    "dense": lambda: [DenseOnly(model, count) for model in DENSE_MODELS for count in (1, 64, 512)],
    "overload": lambda: [Overload()],
    "one-by-one": lambda: [OneByOne(count) for count in (1, 64, 512)],
    "shards": lambda: [Gathering(count) for count in (1, 64, 512)],
    "refresh": lambda: [Refresh("plait", "whole"), Refresh("plait_split", "split")],
    **{name: lambda load=load: [Goodput(load)] for name, load in GOODPUTS.items()},  # type: ignore[misc]
}
"""The workloads by the name given to `--workload`."""


def benchmark(*, only: Sequence[str] = ()) -> Benchmark:
    """Make the benchmark of all workloads, or of those named. Raises `BenchError` for an unknown name."""
    names = chosen(only, tuple(WORKLOADS), "workload")
    return Benchmark(name=NAME, workloads=tuple(workload for name in names for workload in WORKLOADS[name]()))
