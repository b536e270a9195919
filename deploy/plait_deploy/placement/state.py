"""What is free in a cluster: arrays over N nodes and G devices per node, kept up to date by `place` and `release`.

`clock` counts changes, `departed` those that are releases.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait_deploy.errors import ClusterError, TaskError
from plait_deploy.placement.values import WHOLE, ClusterNode, Task, TaskPlacement

Ints = NDArray[np.int64]


class ClusterState:
    """Nodes and what is free on them. Node i is `nodes[i]`; ties of policies fall to the lowest index.

    `cpu` (N,) milli-cores, `memory` (N,) MiB, `devices` (N, G) milli-GPUs (0 where a node has fewer than G), `gpus`
    (N,) devices, `gpu_free` (N,) their sum, `whole` (N,) devices that are wholly free, `widest` (N,) the most that
    one has free, `model` (N,) index into `models`, `running` (N, G + 2) tasks by kind (`kind_of`). Read only.
    """

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        if not nodes:
            raise ClusterError("a cluster has at least one node")
        self.nodes = tuple(nodes)
        self.models = tuple(dict.fromkeys(node.gpu_model for node in nodes))
        width = max(1, *(node.gpus for node in nodes))
        of = {model: index for index, model in enumerate(self.models)}
        self.model: Ints = np.array([of[node.gpu_model] for node in nodes], np.int64)
        self.cpu: Ints = np.array([node.cpu_milli for node in nodes], np.int64)
        self.memory: Ints = np.array([node.memory_mib for node in nodes], np.int64)
        self.gpus: Ints = np.array([node.gpus for node in nodes], np.int64)
        self.devices: Ints = np.where(np.arange(width) < self.gpus[:, None], WHOLE, 0).astype(np.int64)
        self.gpu_free: Ints = self.gpus * WHOLE
        self.whole: Ints = self.gpus.copy()
        self.widest: Ints = self.devices.max(1)
        self.running: Ints = np.zeros((len(nodes), width + 2), np.int64)
        self.clock = self.departed = 0
        self._cpu_milli = int(self.cpu.sum())
        self._crowds: dict[str, Ints] = {}

    @property
    def total_milli(self) -> int:
        """Milli-GPUs of the whole cluster, free or not."""
        return int(self.gpus.sum()) * WHOLE

    @property
    def turnover(self) -> float:
        """What share of the tasks that were ever placed has left, 0 to 1."""
        return self.departed / max(1, self.clock - self.departed)

    @property
    def cpu_scarcer(self) -> bool:
        """Whether a larger share of the CPU is taken than of the GPUs, or there are none."""
        cpu_free = int(self.cpu.sum()) / max(1, self._cpu_milli)
        return not self.total_milli or cpu_free < int(self.gpu_free.sum()) / self.total_milli

    def allows(self, task: Task) -> NDArray[np.bool_] | None:
        """Whether each node's GPU model is one that the task names (N,); None if it names none."""
        if not task.gpu_models or not task.gpus:
            return None
        return np.array([model in task.gpu_models for model in self.models])[self.model]

    def fits(self, task: Task, nodes: Ints, allowed: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """Whether the task fits each of `nodes` (n,) now; `allowed`: what `allows` said of it."""
        fits = (self.cpu[nodes] >= task.cpu_milli) & (self.memory[nodes] >= task.memory_mib)
        if task.gpus == 1:
            fits &= self.widest[nodes] >= task.gpu_milli
        elif task.gpus > 1:
            fits &= self.whole[nodes] >= task.gpus
        if allowed is not None:
            fits &= allowed[nodes]
        if task.per_node and task.group in self._crowds:
            fits &= self._crowds[task.group][nodes] < task.per_node
        return fits

    def best_fit(self, task: Task, node: int) -> TaskPlacement:
        """Return a node with the devices that Ray would take there (`devices_taken`)."""
        return TaskPlacement(node=node, devices=devices_taken(self.devices[node].tolist(), task))

    def roomy(self, task: Task) -> Ints:
        """Return the nodes that the task fits now."""
        return np.flatnonzero(self.fits(task, np.arange(len(self.nodes)), self.allows(task)))

    def first_fit(self, task: Task) -> TaskPlacement | None:
        """Return the first node in order that the task fits, with the devices that Ray would take; None without one."""
        there = self.roomy(task)
        return self.best_fit(task, int(there[0])) if there.size else None

    def place(self, task: Task, at: TaskPlacement) -> None:
        """Take what the task needs. Raises `TaskError`, and changes nothing, if it does not fit there."""
        node = at.node
        row = self.devices[node]
        enough = self.cpu[node] >= task.cpu_milli and self.memory[node] >= task.memory_mib
        if task.per_node and self._crowd(task.group)[node] >= task.per_node:
            raise TaskError(f"node {self.nodes[node].name} has {task.per_node} tasks of {task.group} already")
        if len(set(at.devices)) != task.gpus or not enough or any(row[g] < task.gpu_milli for g in at.devices):
            raise TaskError(f"{task} does not fit on devices {list(at.devices)} of node {self.nodes[node].name}")
        self._change(task, at, -1)

    def release(self, task: Task, at: TaskPlacement) -> None:
        """Give back what `place` took. Raises `TaskError`, and changes nothing, if it was not placed there."""
        node, row = at.node, self.devices[at.node]
        whole = self.nodes[node]
        over = (
            self.cpu[node] + task.cpu_milli > whole.cpu_milli or self.memory[node] + task.memory_mib > whole.memory_mib
        )
        if over or len(set(at.devices)) != task.gpus or any(row[g] + task.gpu_milli > WHOLE for g in at.devices):
            raise TaskError(f"{task} was not placed on devices {list(at.devices)} of node {whole.name}")
        self._change(task, at, 1)
        self.departed += 1

    def _change(self, task: Task, at: TaskPlacement, sign: int) -> None:
        node = at.node
        row = self.devices[node]
        self.cpu[node] += sign * task.cpu_milli
        self.memory[node] += sign * task.memory_mib
        for device in at.devices:
            row[device] += sign * task.gpu_milli
        if at.devices:
            free = row.tolist()
            self.gpu_free[node] = sum(free)
            self.whole[node] = free.count(WHOLE)
            self.widest[node] = max(free)
        self.running[node, kind_of(task)] -= sign
        if task.group:
            self._crowd(task.group)[node] -= sign
        self.clock += 1

    def _crowd(self, group: str) -> Ints:
        """Return how many tasks of a group each node runs (N,)."""
        return self._crowds.setdefault(group, np.zeros(len(self.nodes), np.int64))


def devices_taken(row: Sequence[int], task: Task) -> tuple[int, ...]:
    """Return the devices that Ray would take on a node where so many milli-GPUs are free: the fullest with room for a
    part, the first free ones else; too few if there are no more."""
    if task.is_share:
        room = [(free, device) for device, free in enumerate(row) if free >= task.gpu_milli]
        return (min(room)[1],) if room else ()
    return tuple(device for device, free in enumerate(row) if free == WHOLE)[: task.gpus]


def kind_of(task: Task) -> int:
    """Return 0 for a task without GPUs, 1 for a part of one, and 1 + its GPUs for whole ones."""
    return int(task.is_share) if task.gpu_milli < WHOLE else 1 + task.gpus
