"""Nodes, tasks, classes of tasks, and placements; and what a configuration reserves for each deployment, of which tasks
are made. Units: milli-cores, MiB, milli-GPUs (1000 is one GPU)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait_deploy.errors import ClusterError, TaskError

WHOLE = 1000
"""Milli-GPUs of one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """An empty node: `gpus` devices of one `gpu_model`. Raises `ClusterError`."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int = 0
    gpu_model: str = ""

    def __post_init__(self) -> None:
        if min(self.cpu_milli, self.memory_mib, self.gpus) < 0:
            raise ClusterError(f"node {self.name}: CPU, memory and GPUs are 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one replica needs: `gpu_milli` of each of `gpus` devices of one node. Raises `TaskError`.

    `gpu_models`: only these, if any are named. More than one GPU, or none, is never a fraction. `per_node`: at most so
    many tasks of one `group` on a node; 0 is no limit.
    """

    cpu_milli: int
    memory_mib: int = 0
    gpus: int = 0
    gpu_milli: int = 0
    gpu_models: frozenset[str] = frozenset()
    group: str = ""
    per_node: int = 0

    def __post_init__(self) -> None:
        if min(self.cpu_milli, self.memory_mib, self.gpus, self.gpu_milli, self.per_node) < 0:
            raise TaskError(f"a task needs 0 or more of everything, not {self}")
        if (self.gpus == 0) != (self.gpu_milli == 0) or self.gpu_milli > WHOLE:
            raise TaskError(f"a task has GPUs and 1 to {WHOLE} milli-GPUs of each, or neither; not {self}")
        if self.gpus > 1 and self.gpu_milli != WHOLE:
            raise TaskError(f"several GPUs are whole ones, not {self.gpu_milli} milli-GPUs of each of {self.gpus}")

    @property
    def total_milli(self) -> int:
        """Milli-GPUs over all devices."""
        return self.gpus * self.gpu_milli

    @property
    def is_share(self) -> bool:
        """Whether it takes a part of one device."""
        return 0 < self.gpu_milli < WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskClass:
    """Tasks alike but for memory and group. `weight`: how many there are (popularity is its share of all weights)."""

    task: Task
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlacement:
    """Where a task goes: the node's index, and the devices that it takes part of."""

    node: int
    devices: tuple[int, ...]


def classes_of(tasks: Iterable[Task]) -> tuple[TaskClass, ...]:
    """Return the classes of the tasks, the commonest first; those of equal weight in the order in which they first
    appear."""
    counted = Counter(
        Task(cpu_milli=task.cpu_milli, gpus=task.gpus, gpu_milli=task.gpu_milli, gpu_models=task.gpu_models)
        for task in tasks
    )
    return tuple(TaskClass(task=task, weight=weight) for task, weight in counted.most_common())


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
