"""What is free on nodes, valued by tables: each device by what it and its node's CPU have free, and w wholly free
devices of a node once more, by the classes that need several.

Everything is an integer (weights for popularities), so that equal nodes are equal.

**Fragmentation of nodes** (FGD, section 4): idle GPU that the average task could not use.

    F_n(m) = sum_g R_g [R_g < d_m]   if m has GPUs and fits n (model, c_n >= D_m, k_m devices with R_g >= d_m)
    F_n(m) = sum_g R_g               otherwise
    F_n    = sum_m p_m F_n(m)

What the average task *can* use is sum_g R_g - F_n. For k_m = 1 it is a sum over devices of R_g times the popularity of
classes with D_m <= c_n and d_m <= R_g; for k_m > 1 it is the number w of wholly free devices times the popularity of
classes with D_m <= c_n and k_m <= w. Both are prefix sums, tabled per GPU model: a node costs one look-up for each
device, however many classes there are. `tests/support/placement_twin.py` has the sums as written above.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from plait_deploy.errors import TaskError
from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import WHOLE, Task, TaskClass


class DeviceTables(ABC):
    """The tables for one set of classes, over the GPU models and the devices per node of one cluster.

    `weight`: the sum of all classes' weights. `unit`: what a milli-GPU is in values, 0: the weight. `models`: a table
    each, `table` (N,) which of them a node has. Raises `TaskError` if there is no class.
    """

    def __init__(
        self, classes: Sequence[TaskClass], state: ClusterState, *, models: Sequence[str], table: Ints, unit: int = 0
    ) -> None:
        self.weight = sum(each.weight for each in classes)
        if self.weight <= 0:
            raise TaskError("scores need at least one class of tasks")
        self._unit, self._table, self._width = unit or self.weight, table, state.devices.shape[1]
        self._cpus = np.unique([each.task.cpu_milli for each in classes])
        wholes = np.zeros((len(models), len(self._cpus) + 1, self._width + 1))
        for index, model in enumerate(models):
            for each in usable(classes, model):
                if 1 < each.task.gpus <= self._width:
                    wholes[index, self._rank(each.task) :, each.task.gpus :] += each.weight
        scale = WHOLE * self._unit / self.weight
        self._wholes: Ints = np.rint(wholes * scale * np.arange(self._width + 1)).astype(np.int64).reshape(-1)

    @abstractmethod
    def _of_devices(self, nodes: Ints, cpu: Ints, devices: Ints, free: Ints) -> Ints:
        """Value devices (n, G) of nodes with that much CPU (n,) and GPU (n,) free."""

    def _rank(self, task: Task) -> int:
        """Return the first row of CPU that the task fits."""
        return int(np.searchsorted(self._cpus, task.cpu_milli)) + 1

    def _rows(self, nodes: Ints, cpu: Ints) -> Ints:
        """Return the rows of nodes with that much CPU free."""
        rank = np.searchsorted(self._cpus, cpu, side="right")
        return np.asarray(self._table[nodes] * (len(self._cpus) + 1) + rank)

    def values(self, state: ClusterState, nodes: Ints) -> Ints:
        """Return the value of each of `nodes` (n,)."""
        cpu = state.cpu[nodes]
        parts = self._of_devices(nodes, cpu, state.devices[nodes], state.gpu_free[nodes])
        return np.asarray(parts.sum(1) + self._wholes[self._rows(nodes, cpu) * (self._width + 1) + state.whole[nodes]])

    def gain(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints]:
        """Return by how much less value is lost than the task takes, on each of `nodes` (n,), which it fits, and the
        device.

        The gain is that of the best device, the first of equals; devices are -1 unless the task takes a part of one.
        """
        devices, whole = state.devices[nodes], state.whole[nodes]
        cpu, free = state.cpu[nodes] - task.cpu_milli, state.gpu_free[nodes] - task.total_milli
        now, rows = self._of_devices(nodes, cpu, devices, free), self._rows(nodes, cpu) * (self._width + 1)
        rest = task.total_milli * self._unit - self.values(state, nodes) + now.sum(1)
        if not task.is_share:
            if task.gpus:  # all wholly free devices are worth the same
                one = np.full((len(nodes), 1), WHOLE)
                rest -= task.gpus * self._of_devices(nodes, cpu, one, free)[:, 0]
            return rest + self._wholes[rows + whole - task.gpus], np.full(len(nodes), -1)
        left = devices - task.gpu_milli
        then = self._of_devices(nodes, cpu, np.maximum(left, 0), free) - now
        then += self._wholes[rows[:, None] + (whole[:, None] - (devices == WHOLE))]
        then[left < 0] = np.iinfo(np.int64).min
        best = then.argmax(1)
        return rest + then[np.arange(len(nodes)), best], best


def usable(classes: Sequence[TaskClass], model: str) -> list[TaskClass]:
    """Return the classes that a node with this GPU model may run."""
    return [each for each in classes if not each.task.gpu_models or model in each.task.gpu_models]


class FragmentTables(DeviceTables):
    """Values are what the average task can use of nodes, in milli-GPUs times `weight`; a gain is F before minus F after
    placing the task."""

    def __init__(self, classes: Sequence[TaskClass], state: ClusterState) -> None:
        super().__init__(classes, state, models=state.models, table=state.model)
        parts = np.zeros((len(state.models), len(self._cpus) + 1, WHOLE + 1), np.int64)
        for index, model in enumerate(state.models):
            for each in usable(classes, model):
                if each.task.gpus == 1:
                    parts[index, self._rank(each.task) :, each.task.gpu_milli :] += each.weight
        self._parts: Ints = (parts * np.arange(WHOLE + 1)).reshape(-1)

    def fragments(self, state: ClusterState) -> Ints:
        """Return F of each node (N,), in milli-GPUs times `weight`."""
        return state.gpu_free * self.weight - self.values(state, np.arange(len(state.nodes)))

    def _of_devices(self, nodes: Ints, cpu: Ints, devices: Ints, free: Ints) -> Ints:  # noqa: ARG002  # the seam's
        return np.asarray(self._parts[self._rows(nodes, cpu)[:, None] * (WHOLE + 1) + devices])
