"""The operators at the sizes of real models, as `plait bench kernels` measures them: against eager and compiled torch."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median

from plait_bench.errors import Disagreement
from plait_bench.gpu.rows import GpuRun
from plait_bench.kernels import COMPILED, benchmark

_ROUNDS = 5


def operators(run: GpuRun) -> None:
    """Compare and time each that a GPU has."""
    for workload in benchmark(only=("geglu",) if run.tiny else ()).workloads:
        if run.left_s <= 0:
            return
        with ExitStack() as opened:
            names = [name for name in workload.systems if not (run.tiny and name == COMPILED)]
            subjects = {name: opened.enter_context(workload.open(name, "")) for name in names}
            for subject in subjects.values():
                subject.warm_up()
            try:
                workload.check(subjects)
            except Disagreement as error:
                run.failed("operators", str(error))
            taken: dict[str, list[float]] = {name: [] for name in names}
            for number in range(_ROUNDS):
                for name, subject in subjects.items():
                    taken[name] += [reading.value for reading in subject.measure(number)]
            for name, each in taken.items():
                run.row("operators", workload.name, metric="us", value=median(each), unit="us", system=name, n=len(each))
