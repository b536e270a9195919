"""The fabric: throughput of shared memory, round-trip times of small and large messages, and whether a modelled link
keeps its own time.

Rows of kind `modelled` hold what a link's model computes; rows of kind `measured` were measured on this machine,
even where what was measured is a modelled channel: they show how well real time follows the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait_bench.benchmark import Benchmark, Workload, chosen
from plait_bench.fabric import links, round_trips, throughput, transports

NAME = "fabric"

WORKLOADS: Mapping[str, type[Workload]] = {
    throughput.WORKLOAD: throughput.Throughput,
    round_trips.WORKLOAD: round_trips.RoundTrips,
    transports.WORKLOAD: transports.Transports,
    links.WORKLOAD: links.ModelledLinks,
}


def benchmark(*, only: Sequence[str] = ()) -> Benchmark:
    """Make the benchmark of all workloads, or of those named. Raises `BenchError` for an unknown name."""
    names = chosen(only, tuple(WORKLOADS), "workload")
    return Benchmark(name=NAME, workloads=tuple(WORKLOADS[name]() for name in names))
