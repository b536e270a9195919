"""What a configuration asks a cluster for: replicas, alike within a demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait_deploy.placement.errors import TaskError
from plait_deploy.placement.values import WHOLE, Task, TaskClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`replicas` of the deployment `name`, each of which needs `task`."""

    name: str
    task: Task
    replicas: int


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
