"""The hourly cost of a configuration: the prices of a job times what the configuration *reserves*, or what it *used*.

Reserved is what Ray sets aside for it, used or not: `num_cpus` and `num_gpus` of all replicas, the ingress included,
as fractions. `threads` are a cap and cost nothing. Used are the processor-seconds per second that the replicas were
seen to take. Memory is the maximum that was measured and GPUs are those reserved, in both: Ray reserves no memory for
plait, and nothing measures shares of GPUs. An autoscaling deployment reserves its maximum count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait.config import ServedConfig
from plait.deployments import deployments
from plait.errors import PlaitError
from plait_autoconfig.jobs.spec import JobSpec, Prices
from plait_autoconfig.objective import COST_PER_HOUR
from plait_autoconfig.values import Config
from plait_serving.cores import HostCores
from plait_serving.deployments import INGRESS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedResources:
    """The resources of all deployments together. `memory_gib`: None where it counts as measured."""

    cores: float
    gpus: float
    memory_gib: float | None = None


def reserved(config: ServedConfig) -> ReservedResources:
    """Return the cores and GPUs that Ray reserves for the deployments."""
    rows = deployments(config)
    return ReservedResources(
        cores=sum(row.max_replicas * row.num_cpus for row in rows),
        gpus=sum(row.max_replicas * row.num_gpus for row in rows),
    )


def host_cores_of(config: ServedConfig, *, machine_cores: int) -> HostCores:
    """Return the thread caps of all deployments together, as if one machine with so many cores ran them all."""
    models = [row for row in deployments(config) if row.name != INGRESS]
    threads = [row.max_replicas * (int((row.knobs or {}).get("threads", 1)) or machine_cores) for row in models]
    return HostCores(cores=machine_cores, planned_threads=sum(threads))


def cost_metrics(prices: Prices, what: ReservedResources, *, used_cores: float, memory_gib: float) -> dict[str, float]:
    """Return the metrics that say what a configuration costs: by what it reserves, by what it used, and, as
    `cost_per_hour`, by the basis of the prices."""
    memory_gib = memory_gib if what.memory_gib is None else what.memory_gib
    rest = what.gpus * prices.gpu + memory_gib * prices.gib
    by_basis = {"reserved": what.cores * prices.core + rest, "used": used_cores * prices.core + rest}
    return {
        "cpu_cores": used_cores,
        "memory_gib": memory_gib,
        "reserved_cores": what.cores,
        **{f"{basis}_cost_per_hour": cost for basis, cost in by_basis.items()},
        COST_PER_HOUR: by_basis[prices.basis],
    }


def known_costs(spec: JobSpec, reserves: Callable[[Config], ReservedResources]) -> tuple[float, ...]:
    """Return the costs of all cells of the space, without memory that only a trial shows. `reserves`: what a cell
    reserves; it raises `PlaitError` for one that is not valid.

    Empty unless the goal is a single one that involves the cost and what is reserved is priced; also if memory is the
    only cost of some cell, or if some cell is not a valid configuration, as its trial will report.
    """
    prices = spec.prices
    if len(spec.goal.goals) > 1 or not spec.goal.goals[0].has_cost or prices.basis != "reserved":
        return ()
    costs: list[float] = []
    for cell in spec.space.cells():
        try:
            what = reserves(cell)
        except PlaitError:
            return ()
        costs.append(cost_metrics(prices, what, used_cores=0.0, memory_gib=0.0)[COST_PER_HOUR])
    return tuple(costs) if all(cost > 0.0 for cost in costs) else ()
