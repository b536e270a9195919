"""What a configuration reserves of a cluster for each deployment, and what of that is placed: replicas, alike within a
demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait_deploy.errors import TaskError
from plait_deploy.placement.values import WHOLE, Task, TaskClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`replicas` of the deployment `name`, each of which needs `task`."""

    name: str
    task: Task
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A Serve deployment: what one replica reserves in cores and GPUs, and how many there are, at least and at most.
    `is_shard`: it holds part of a model's tables, at most `memory_bytes` of them (0: not known). `workload`: whose
    health it is part of; the ingress is of both."""

    name: str
    num_cpus: float
    num_gpus: float = 0.0
    min_replicas: int = 1
    max_replicas: int = 1
    is_shard: bool = False
    memory_bytes: int = 0
    workload: str | None = None

    def demand(self, *, per_node: int = 0) -> Demand:
        """Return what is placed, at most `per_node` replicas on a node (0: any): where their number follows the load,
        the most. Raises `TaskError` for what Ray refuses."""
        task = task_of(self.name, num_cpus=self.num_cpus, num_gpus=self.num_gpus, per_node=per_node)
        return Demand(name=self.name, task=task, replicas=self.max_replicas)


def task_of(name: str, *, num_cpus: float, num_gpus: float, per_node: int = 0) -> Task:
    """Return what a replica of the deployment `name` with these Ray resources needs; `per_node`: at most so many of
    them on a node, 0 any. Raises `TaskError` for what Ray refuses as well.

    Parts of a CPU or GPU are rounded up to thousandths.
    """
    if num_gpus > 1 and num_gpus != int(num_gpus):
        raise TaskError(f"{name}: {num_gpus:g} GPUs; above 1 Ray takes whole numbers only")
    gpus = max(1, int(num_gpus)) if num_gpus > 0 else 0
    milli = 0 if not gpus else WHOLE if num_gpus >= 1 else _up(num_gpus)
    return Task(cpu_milli=_up(num_cpus), gpus=gpus, gpu_milli=milli, group=name if per_node else "", per_node=per_node)


def _up(value: float) -> int:
    return -int(-round(value * WHOLE, 6) // 1)


def demand_classes(demands: Sequence[Demand]) -> tuple[TaskClass, ...]:
    """Return the classes of the demands' replicas: every one of them, with its replicas as weight."""
    return tuple(TaskClass(task=each.task, weight=each.replicas) for each in demands if each.replicas)
