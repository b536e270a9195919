"""Single operators at the sizes of real models: time, bandwidth, and the share of what a plain copy reaches.

`python -m plait_bench.kernels --json` runs it where only torch, Triton and plait's kernels are installed;
`plait bench kernels` is the same. Without a GPU it measures the CPU forms, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait_bench.benchmark import Benchmark, chosen
from plait_bench.kernels.cases import cases
from plait_bench.kernels.guided import GuidedUpdate
from plait_bench.kernels.lookups import lookup_cases
from plait_bench.kernels.merging import merge_cases
from plait_bench.kernels.timing import timer
from plait_bench.kernels.tried import tried_cases
from plait_bench.kernels.workload import OperatorWorkload

NAME = "kernels"


def benchmark(*, only: Sequence[str] = ()) -> Benchmark:
    """Make the benchmark of all cases, or of those whose operator or name was given. Raises `BenchError`."""
    clock = timer()
    found = cases(clock.device)
    if clock.device == "cpu":
        found += [*merge_cases(), *lookup_cases(), *tried_cases()]
    guided = [GuidedUpdate(edge) for edge in (16, 64)] if clock.device == "cpu" else []
    names = {case.name: case.op for case in found} | {one.name: "guided_update" for one in guided}
    asked = set(only) - set(names.values())
    wanted = set(chosen([*asked], tuple(names), "workload")) if asked else set()
    return Benchmark(
        name=NAME,
        workloads=tuple(
            OperatorWorkload(case, clock) for case in found if not only or case.op in only or case.name in wanted
        )
        + tuple(one for one in guided if not only or "guided_update" in only or one.name in wanted),
    )
