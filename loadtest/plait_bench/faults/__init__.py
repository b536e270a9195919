"""Runs against a whole server: processes that are killed, a tenant that floods or attacks, hours of load.

What is promised is judged: what was not so stands below the table, and the command ends with 99. A workload starts a
server of its own; systems are its states, which are measured in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait_bench.benchmark import Workload, selected
from plait_bench.faults.attacks import ALL, ATTACKS
from plait_bench.faults.killing import Ends, Night, Steady
from plait_bench.faults.server import OnServer
from plait_bench.faults.tenants import FirstImage, ManyFiles, ManyModels, Neighbour, Refusals, Share

SEEDS, QUICK_SEEDS = 3, 1


def benchmark(*, only: Sequence[str] = ()) -> tuple[Workload, ...]:
    """Make the benchmark of all workloads, or of those named. Raises `BenchError` for an unknown name."""
    workloads: list[OnServer] = [
        Ends("ends"),
        Night("night"),
        Share("share"),
        FirstImage("first-image"),
        *(Neighbour(f"neighbours-{attack}", attack) for attack in (*ATTACKS, ALL)),
        ManyModels("many-models"),
        ManyFiles("many-files"),
        *(Refusals(f"refusals-{count}", count, max_p99_s) for count, max_p99_s in ((100, 1.0), (500, 2.0))),
        Steady("steady"),
    ]
    return selected(workloads, only)
