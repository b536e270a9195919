"""The hourly cost of a configuration: the prices of a job times what the configuration *reserves*.

The reserved amount is what a machine must have for it, used or not: the cores of a replica are its budget, `num_cpus`;
without one, it keeps as many busy as it has `threads` (0: all of the machine). The ingress has one; a replica's GPUs
are its `num_gpus`. Memory has no reservation in plait, so it is the maximum that was measured. An autoscaling
deployment reserves its maximum count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.config import INGRESS, PlaitConfig, ServedConfig
from plait.errors import PlaitError
from plait.server.restarts import plans
from plait.tuning.measure.knobs import apply_knobs
from plait_autoconfig.jobs.spec import JobSpec
from plait_serving.cores import HostCores

__all__ = ["ReservedResources", "cost_per_hour", "host_cores_of", "known_costs", "reserved"]

_INGRESS_CORES = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedResources:
    """The resources of all deployments together."""

    cores: float
    gpus: float


def reserved(config: ServedConfig, *, machine_cores: int) -> ReservedResources:
    """Return the cores and GPUs that the deployments reserve."""
    cores, gpus = _INGRESS_CORES, 0.0
    for name, plan in plans(config).items():
        if name != INGRESS:
            count = max_count(plan.replicas)
            cores += count * (plan.num_cpus or int(plan.knobs.get("threads", 1)) or machine_cores)
            gpus += count * plan.num_gpus
    return ReservedResources(cores=cores, gpus=gpus)


def host_cores_of(config: ServedConfig, *, machine_cores: int) -> HostCores:
    """Return the thread caps of all deployments together, as if one machine with so many cores ran them all."""
    planned = 0
    for name, plan in plans(config).items():
        if name != INGRESS:
            planned += max_count(plan.replicas) * (int(plan.knobs.get("threads", 1)) or machine_cores)
    return HostCores(cores=machine_cores, planned_threads=planned)


def max_count(replicas: Any) -> int:
    """Return the maximum of a number of replicas, or of bounds for one (`{min: 1, max: 4}`)."""
    return int(replicas["max"] if isinstance(replicas, Mapping) else replicas)


def cost_per_hour(
    what: ReservedResources, *, memory_gib: float, core_hour: float, gpu_hour: float = 0.0, gib_hour: float = 0.0
) -> float:
    """Return the cost per hour in the currency of the prices."""
    return what.cores * core_hour + what.gpus * gpu_hour + memory_gib * gib_hour


def known_costs(spec: JobSpec, config: PlaitConfig, *, machine_cores: int) -> tuple[float, ...]:
    """Return the costs of all cells of the space, without their memory, which only a trial shows.

    Empty unless the goal is a single one that involves the cost, if memory is the only cost of some cell, or if some
    cell is not a valid configuration, as its trial will report.
    """
    prices = spec.prices
    if len(spec.goal.goals) > 1 or not spec.goal.goals[0].has_cost:
        return ()
    costs: list[float] = []
    for cell in spec.space.cells():
        try:
            what = reserved(apply_knobs(config, spec.settings(cell)), machine_cores=machine_cores)
        except PlaitError:
            return ()
        costs.append(cost_per_hour(what, memory_gib=0.0, core_hour=prices.core, gpu_hour=prices.gpu))
    return tuple(costs) if all(cost > 0.0 for cost in costs) else ()
