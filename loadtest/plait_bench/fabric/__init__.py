"""The fabric: how fast shared memory carries data, how soon a small message is back, and whether a modelled link keeps
its own time.

Rows of kind ``modelled`` say what a link's model says; those of kind ``measured`` were measured on this machine, also
where what was measured is a modelled channel: they show how well real time follows the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait_bench.benchmark import Benchmark, Workload, chosen
from plait_bench.fabric import links, round_trips, throughput

NAME = "fabric"

WORKLOADS: Mapping[str, type[Workload]] = {
    throughput.WORKLOAD: throughput.Throughput,
    round_trips.WORKLOAD: round_trips.RoundTrips,
    links.WORKLOAD: links.ModelledLinks,
}


def benchmark(*, only: Sequence[str] = ()) -> Benchmark:
    """Make the benchmark of all workloads, or of those named. Raises `BenchError` for an unknown name."""
    names = chosen(only, tuple(WORKLOADS), "workload")
    return Benchmark(name=NAME, workloads=tuple(WORKLOADS[name]() for name in names))
