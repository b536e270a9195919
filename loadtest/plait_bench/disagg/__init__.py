"""Ranking models, whole and cut in two, against plain PyTorch behind FastAPI.

All systems hold the same weights, speak the same protocol and answer the same bodies; their scores are compared first.
The main metric is goodput (`goodput.py`); `in_process.py` shows what the cut costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait_bench.benchmark import Workload, selected
from plait_bench.disagg.goodput import SCALES, Goodput
from plait_bench.disagg.in_process import InProcess, OneByOne


def benchmark(*, only: Sequence[str] = ()) -> tuple[Workload, ...]:
    """Make the benchmark of all workloads, or of those named. Raises `BenchError` for an unknown name."""
    counts = (1, 64, 512)
    workloads: list[Workload] = [
        *(InProcess(f"in-process-{model}-{count}", model, count) for model in SCALES for count in counts[1:]),
        *(OneByOne(f"one-by-one-{count}", "rm1", count) for count in counts),
        *(Goodput(f"{model}-{count}", model, count) for model in SCALES for count in counts),
    ]
    return selected(workloads, only)
