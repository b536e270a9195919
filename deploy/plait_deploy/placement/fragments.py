"""Fragmentation of nodes (FGD, section 4): idle GPU that the average task could not use.

    F_n(m) = sum_g R_g [R_g < d_m]   if m has GPUs and fits n (model, c_n >= D_m, k_m devices with R_g >= d_m)
    F_n(m) = sum_g R_g               otherwise
    F_n    = sum_m p_m F_n(m)

What the average task *can* use is sum_g R_g - F_n. For k_m = 1 it is a sum over devices of R_g times the popularity of
classes with D_m <= c_n and d_m <= R_g; for k_m > 1 it is the number w of wholly free devices times the popularity of
classes with D_m <= c_n and k_m <= w. Both are prefix sums, tabled per GPU model: a node costs one look-up for each
device, however many classes there are. Everything is an integer (weights for popularities), so that equal scores are
equal. `naive.py` has the sums as written above.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait_deploy.errors import TaskError
from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import WHOLE, Task, TaskClass


class FragmentTables:
    """The tables for one set of classes, over the GPU models and the devices per node of one cluster.

    `weight`: the sum of all classes' weights; amounts below are in milli-GPUs times this. Raises `TaskError` if there
    is no class.
    """

    def __init__(self, classes: Sequence[TaskClass], state: ClusterState) -> None:
        self.weight = sum(each.weight for each in classes)
        if self.weight <= 0:
            raise TaskError("fragmentation needs at least one class of tasks")
        width = state.devices.shape[1]
        self._cpus = np.unique([each.task.cpu_milli for each in classes])
        self._ranks = len(self._cpus) + 1
        parts = np.zeros((len(state.models), self._ranks, WHOLE + 1), np.int64)
        wholes = np.zeros((len(state.models), self._ranks, width + 1), np.int64)
        for each in classes:
            task = each.task
            rank = int(np.searchsorted(self._cpus, task.cpu_milli)) + 1
            for model, name in enumerate(state.models):
                if task.gpu_models and name not in task.gpu_models:
                    continue
                if task.gpus == 1:
                    parts[model, rank:, task.gpu_milli :] += each.weight
                elif 1 < task.gpus <= width:
                    wholes[model, rank:, task.gpus :] += each.weight
        self._parts: Ints = (parts * np.arange(WHOLE + 1)).reshape(-1)
        self._wholes: Ints = (wholes * (WHOLE * np.arange(width + 1))).reshape(-1)
        self._width = width

    def usable(self, state: ClusterState, nodes: Ints) -> Ints:
        """Return what the average task can use of each of `nodes` (n,), in milli-GPUs times `weight`."""
        parts, wholes = self._rows(state, nodes, 0)
        whole = self._wholes[wholes + state.whole[nodes]]
        return np.asarray(self._parts[parts[:, None] + state.devices[nodes]].sum(1) + whole)

    def fragments(self, state: ClusterState, nodes: Ints | None = None) -> Ints:
        """Return F of each of `nodes` (n,), or of all, in milli-GPUs times `weight`."""
        nodes = np.arange(len(state.nodes)) if nodes is None else nodes
        return state.gpu_free[nodes] * self.weight - self.usable(state, nodes)

    def gain(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints]:
        """Return F before minus F after placing the task on each of `nodes` (n,), which it fits, and the device.

        The gain is that of the best device, the first of equals; devices are -1 unless the task takes a part of one.
        """
        before = self.usable(state, nodes)
        parts, wholes = self._rows(state, nodes, task.cpu_milli)
        devices, whole = state.devices[nodes], state.whole[nodes]
        now = self._parts[parts[:, None] + devices]
        rest = now.sum(1)
        none = np.full(len(nodes), -1)
        if not task.is_share:
            # All wholly free devices are worth the same.
            after = rest - task.gpus * self._parts[parts + WHOLE] + self._wholes[wholes + whole - task.gpus]
            return task.total_milli * self.weight + after - before, none
        left = devices - task.gpu_milli
        then = self._parts[parts[:, None] + np.maximum(left, 0)] - now
        then += self._wholes[wholes[:, None] + (whole[:, None] - (devices == WHOLE))]
        then[left < 0] = np.iinfo(np.int64).min
        best = then.argmax(1)
        after = rest + then[np.arange(len(nodes)), best]
        return task.total_milli * self.weight + after - before, best

    def _rows(self, state: ClusterState, nodes: Ints, cpu_milli: int) -> tuple[Ints, Ints]:
        """Return where the rows of `nodes`, with that much less CPU, begin in both tables."""
        rank = np.searchsorted(self._cpus, state.cpu[nodes] - cpu_milli, side="right")
        row = state.model[nodes] * self._ranks + rank
        return row * (WHOLE + 1), row * (self._width + 1)


def integer_scores(gain: Ints, weight: int) -> NDArray[np.int64]:
    """Return FGD's published score: int(100 sigmoid(gain in GPUs)), 0..100. One step is about 0.04 GPU near 0."""
    return np.asarray(100.0 / (1.0 + np.exp(gain / (-WHOLE * weight))), np.int64)
