"""Designers on services whose every configuration is known: how many trials until a good one is found?

Workloads: `falcon` (a published table, read from the data folder), `synthetic` (made-up services with noise and failing
configurations, in several variants), and measurements of our own diffusion engine and ranker (`own-images`,
`own-recommend`). A round is a seed: all designers get the same number of trials and the same seeds; every service is
new once, tuned with the others as its library. No designer knows the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from plait_bench.autoconfig import synthetic
from plait_bench.autoconfig.searching import Searching
from plait_bench.autoconfig.services import SPACES, falcon_suite, own_suite
from plait_bench.benchmark import Workload, selected

SEEDS, QUICK_SEEDS = 20, 2


def benchmark(*, only: Sequence[str] = (), data: Path | None = None) -> tuple[Workload, ...]:
    """Make the benchmark. Raises `BenchError`."""
    made: dict[str, Searching] = {}
    for family, name in synthetic.FAMILIES.items():
        cold = made["cold"] if family in synthetic.MISLEADING else None
        made[family] = Searching(name, partial(synthetic.suite, family), cold)
    own = [Searching(f"own-{service}", partial(own_suite, service)) for service in SPACES]
    return selected([Searching("falcon", partial(falcon_suite, data)), *made.values(), *own], only)
