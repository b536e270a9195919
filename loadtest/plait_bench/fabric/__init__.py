"""The fabric: throughput of shared memory, round-trip times of small and large messages, and whether a modelled link
keeps its own time.

Rows of kind `modelled` hold what a link's model computes; rows of kind `measured` were measured on this machine,
even where what was measured is a modelled channel: they show how well real time follows the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait_bench.benchmark import Workload, selected
from plait_bench.fabric.bounced import ModelledLinks, Transports
from plait_bench.fabric.shared_memory import RoundTrips, Throughput

WORKLOADS = (Throughput, RoundTrips, Transports, ModelledLinks)


def benchmark(*, only: Sequence[str] = ()) -> tuple[Workload, ...]:
    """Make the benchmark of all workloads, or of those named. Raises `BenchError` for an unknown name."""
    return selected([workload() for workload in WORKLOADS], only)
