"""What is free on a node, valued by how much of it will be used: the score of the policy `plait`.

FGD asks whether the average *next* task could use what is left. Here tasks keep coming, drawn by popularity p_m, and
take their part of one device as long as they fit, until time runs out (with weight h against each arrival):

    V(c, R) = sum_m p_m (d_m + V(c - D_m, R - d_m)) / (h + sum_m p_m)    over m with k_m <= 1, D_m <= c, d_m <= R

for a device with R milli-GPUs free and c milli-cores to itself. How long there is, nobody knows; a small h alone would
count on rare tasks for more leftovers than they can fill. So values are means over the two of `HURRIES`. Tasks without
GPUs come too (d_m = 0) and use up CPU. A node's CPU is split over its devices in proportion to what they have free, so
that a device whose neighbours need the CPU is worth less. Several GPUs need whole devices: w of them are worth another
sum_m p_m 1000 w [k_m <= w, D_m <= c_n] over the classes with k_m > 1, as in FGD.

CPU is counted in steps of 1/128 of the CPU of the largest node. Values are kept as integers of 1/1024 milli-GPU, so
that equal nodes are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait_deploy.errors import TaskError
from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import WHOLE, Task, TaskClass

HURRIES = (0.01, 0.3)
"""h: time for some hundred tasks, or for three. Chosen on the three public lists and made-up ones; between 0.003 and 1,
alone or in pairs, allocation on `default` moves by 0.2 points."""
STEPS = 128
UNIT = 1024
"""Integers of one milli-GPU."""


class ExpectedUse:
    """The values for one set of classes, over the GPU models and nodes of one cluster. Raises `TaskError` if there is
    no class."""

    def __init__(self, classes: Sequence[TaskClass], state: ClusterState) -> None:
        weight = sum(each.weight for each in classes)
        if weight <= 0:
            raise TaskError("prospects need at least one class of tasks")
        self._grain = max(1, -(-max(node.cpu_milli for node in state.nodes) // STEPS))
        width = state.devices.shape[1]
        picky = any(each.task.gpu_models for each in classes)
        models = state.models if picky else ("",)
        self._table: Ints = state.model if picky else np.zeros(len(state.nodes), np.int64)
        self._parts: Ints = np.concatenate(
            [_device_values(_usable(classes, model), weight, self._grain).reshape(-1) for model in models]
        )
        self._cpus = np.unique([each.task.cpu_milli for each in classes])
        self._ranks = len(self._cpus) + 1
        wholes = np.zeros((len(models), self._ranks, width + 1), np.float64)
        for index, model in enumerate(models):
            for each in _usable(classes, model):
                if 1 < each.task.gpus <= width:
                    rank = int(np.searchsorted(self._cpus, each.task.cpu_milli)) + 1
                    wholes[index, rank:, each.task.gpus :] += each.weight / weight
        self._wholes: Ints = np.rint(wholes * (WHOLE * UNIT) * np.arange(width + 1)).astype(np.int64).reshape(-1)
        self._width = width

    def values(self, state: ClusterState, nodes: Ints) -> Ints:
        """Return the value of each of `nodes` (n,), in 1/1024 milli-GPU."""
        devices, cpu = state.devices[nodes], state.cpu[nodes]
        parts = self._of_devices(nodes, cpu, devices, state.gpu_free[nodes])
        wholes = self._wholes[self._whole_rows(nodes, cpu) + state.whole[nodes]]
        return np.asarray(parts.sum(1) + wholes)

    def gain(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints]:
        """Return by how much less value is lost than the task takes, on each of `nodes` (n,), which it fits, and the
        device, as `FragmentTables.gain` does."""
        devices, whole = state.devices[nodes], state.whole[nodes]
        cpu, free = state.cpu[nodes] - task.cpu_milli, state.gpu_free[nodes] - task.total_milli
        now = self._of_devices(nodes, cpu, devices, free)
        rest, rows = now.sum(1), self._whole_rows(nodes, cpu)
        taken = task.total_milli * UNIT - self.values(state, nodes)
        if not task.is_share:
            if task.gpus:
                one = np.full((len(nodes), 1), WHOLE)
                rest = rest - task.gpus * self._of_devices(nodes, cpu, one, free)[:, 0]
            return taken + rest + self._wholes[rows + whole - task.gpus], np.full(len(nodes), -1)
        left = devices - task.gpu_milli
        then = self._of_devices(nodes, cpu, np.maximum(left, 0), free) - now
        then += self._wholes[rows[:, None] + (whole[:, None] - (devices == WHOLE))]
        then[left < 0] = np.iinfo(np.int64).min
        best = then.argmax(1)
        return taken + rest + then[np.arange(len(nodes)), best], best

    def _of_devices(self, nodes: Ints, cpu: Ints, devices: Ints, free: Ints) -> Ints:
        """Value devices (n, G) of nodes with that much CPU (n,) and GPU (n,) free."""
        share = cpu[:, None] * devices // (np.maximum(free, 1) * self._grain)[:, None]
        row = self._table[nodes][:, None] * (STEPS + 1) + np.minimum(share, STEPS)
        return np.asarray(self._parts[row * (WHOLE + 1) + devices])

    def _whole_rows(self, nodes: Ints, cpu: Ints) -> Ints:
        rank = np.searchsorted(self._cpus, cpu, side="right")
        return np.asarray((self._table[nodes] * self._ranks + rank) * (self._width + 1))


def _usable(classes: Sequence[TaskClass], model: str) -> list[TaskClass]:
    """Return the classes that a node with this GPU model may run."""
    return [each for each in classes if not each.task.gpu_models or model in each.task.gpu_models]


def _device_values(classes: Sequence[TaskClass], weight: int, grain: int) -> Ints:
    """Return V as a table (STEPS + 1, WHOLE + 1). A task with any GPU takes at least one step of CPU."""
    coming: dict[tuple[int, int], float] = {}
    for each in classes:
        task = each.task
        steps = max(1, -(-task.cpu_milli // grain))
        if task.gpus <= 1 and steps <= STEPS:
            coming[steps, task.gpu_milli] = coming.get((steps, task.gpu_milli), 0.0) + each.weight / weight
    hurries = np.array(HURRIES)[:, None]
    values: NDArray[np.float64] = np.zeros((STEPS + 1, len(HURRIES), WHOLE + 1))
    for cpu in range(1, STEPS + 1):
        gained, chance = np.zeros((len(HURRIES), WHOLE + 1)), np.zeros(WHOLE + 1)
        for (steps, milli), popularity in coming.items():
            if steps <= cpu:
                gained[:, milli:] += popularity * (milli + values[cpu - steps, :, : WHOLE + 1 - milli])
                chance[milli:] += popularity
        values[cpu] = gained / (hurries + chance)
    return np.asarray(np.rint(values.mean(1) * UNIT), np.int64)
