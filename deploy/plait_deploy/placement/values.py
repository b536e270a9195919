"""Nodes, tasks, classes of tasks, and placements. Units: milli-cores, MiB, milli-GPUs (1000 is one GPU)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
