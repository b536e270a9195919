"""Ranking models, whole and cut in two, against plain PyTorch behind FastAPI.

All systems hold the same weights, speak the same protocol and answer the same bodies; their scores are compared first.
The main metric is goodput (`goodput.py`); `in_process.py` shows what the cut costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from plait_bench.benchmark import Benchmark, Workload, chosen
from plait_bench.disagg.goodput import SCALES, Goodput
from plait_bench.disagg.in_process import InProcess, OneByOne


def _in_process() -> list[Workload]:
    return [
        InProcess(f"in-process-{model}-{count}", model, scale, count)
        for model, scale in SCALES.items()
        for count in (64, 512)
    ]


def _one_by_one() -> list[Workload]:
    return [OneByOne(f"one-by-one-{count}", "rm1", SCALES["rm1"], count) for count in (1, 64, 512)]


def _goodput(model: str, candidates: int) -> list[Workload]:
    return [Goodput(model, candidates)]


WORKLOADS: Mapping[str, Callable[[], Sequence[Workload]]] = {
    "in-process": _in_process,
    "one-by-one": _one_by_one,
    **{f"{model}-{count}": partial(_goodput, model, count) for model in SCALES for count in (1, 64, 512)},
}
"""The workloads by the name given to `--workload`."""


def benchmark(*, only: Sequence[str] = ()) -> Benchmark:
    """Make the benchmark of all workloads, or of those named. Raises `BenchError` for an unknown name."""
    names = chosen(only, tuple(WORKLOADS), "workload")
    return Benchmark(workloads=tuple(workload for name in names for workload in WORKLOADS[name]()))
