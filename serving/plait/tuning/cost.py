"""What a configuration costs an hour: the prices of a job times what the configuration *reserves*.

What is reserved is what a machine must have for it, used or not: a replica of a worker or an engine keeps as many cores
busy as its ``threads`` (0: all of the machine), the ingress one; a replica's GPUs are its ``num_gpus``. Memory has no
reservation in plait, so it is the largest that was measured. A deployment that scales by itself reserves its largest
count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.config import INGRESS, PlaitConfig, Served
from plait.restarts import plans
from plait.tuning.knobs import apply_knobs
from plait_autoconfig.jobs.spec import JobSpec

__all__ = ["Reserved", "cost_per_hour", "known_costs", "reserved"]

_INGRESS_CORES = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Of all deployments together."""

    cores: float
    gpus: float


def reserved(config: Served, *, machine_cores: int) -> Reserved:
    """The cores and GPUs that the deployments reserve."""
    cores, gpus = _INGRESS_CORES, 0.0
    for name, plan in plans(config).items():
        if name != INGRESS:
            count = largest_count(plan.replicas)
            cores += count * (int(plan.knobs.get("threads", 1)) or machine_cores)
            gpus += count * plan.num_gpus
    return Reserved(cores=cores, gpus=gpus)


def largest_count(replicas: Any) -> int:
    """Of a number of replicas, or of bounds for one (``{min: 1, max: 4}``)."""
    return int(replicas["max"] if isinstance(replicas, Mapping) else replicas)


def cost_per_hour(
    what: Reserved, *, memory_gib: float, core_hour: float, gpu_hour: float = 0.0, gib_hour: float = 0.0
) -> float:
    """In the currency of the prices."""
    return what.cores * core_hour + what.gpus * gpu_hour + memory_gib * gib_hour


def known_costs(spec: JobSpec, config: PlaitConfig, *, machine_cores: int) -> tuple[float, ...]:
    """Of all cells of the space but for their memory, which only a trial shows; empty if that is all they cost."""
    cells = [apply_knobs(config, spec.settings(cell)) for cell in spec.space.cells()]
    reserve = [reserved(cell, machine_cores=machine_cores) for cell in cells]
    prices = spec.prices
    costs = [cost_per_hour(what, memory_gib=0.0, core_hour=prices.core, gpu_hour=prices.gpu) for what in reserve]
    return tuple(costs) if all(cost > 0.0 for cost in costs) else ()
