"""plait's own policy. Its score depends on whether the cluster fills up, or its GPUs turn over.

**Fills up**: few of the tasks that came have left, or CPU is what runs out. What is left over of a device stays, and
may be filled by many tasks to come: a task goes where the least of what will be used is lost (`ExpectedUse`).

**Turns over**: departures make new leftovers as fast as arrivals fill old ones, and free CPU and GPU are never used up.
What counts is that the next task can use them: a task goes where fragmentation grows least (`FragmentTables`). A class
weighs as much as it has tasks, times the devices that one asks for: what is lost if it is refused.

Against FGD, in both: it knows all classes, not the commonest 95 %, and its scores are not rounded, so equal scores are
equal leftovers; ties go to the node with the least left over. In the first, it also counts what later tasks will still
take, and sees CPU run out before it has.

**What will be used of what is free on a node.**

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
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from plait_deploy.placement.device_tables import DeviceTables, FragmentTables, usable
from plait_deploy.placement.policies.scored import ScoredPolicy, Ties
from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import WHOLE, Task, TaskClass

TURNS_OVER = 0.05
"""The cluster turns over once so many of the tasks that were ever placed have left (`ClusterState.turnover`). So low,
because the first rule also puts small tasks on the few nodes that rare large ones need, and with departures these nodes
never become free again."""
HURRIES = (0.01, 0.3)
"""h: time for some hundred tasks, or for three. Chosen on the three public lists and made-up ones; between 0.003 and 1,
alone or in pairs, allocation on `default` moves by 0.2 points."""
STEPS = 128
UNIT = 1024
"""Integers of one milli-GPU."""


class PlaitPolicy(ScoredPolicy):
    """The policy of the module docstring."""

    def __init__(self, classes: Sequence[TaskClass], *, ties: Ties = Ties.BEST_FIT, seed: int = 0) -> None:
        super().__init__(ties=ties, seed=seed)
        self._classes = tuple(classes)

    def begin(self, state: ClusterState) -> None:
        """Make the tables for the cluster."""
        weighed = [replace(each, weight=each.weight * max(1, each.task.gpus)) for each in self._classes]
        self._tables = (ExpectedUse(self._classes, state), FragmentTables(weighed, state))

    def score(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints | None]:
        """Score by the gain of the best device."""
        turns_over = state.turnover >= TURNS_OVER and not state.cpu_scarcer
        return self._tables[turns_over].gain(state, task, nodes)


class ExpectedUse(DeviceTables):
    """Values are in 1/1024 milli-GPU."""

    def __init__(self, classes: Sequence[TaskClass], state: ClusterState) -> None:
        picky = any(each.task.gpu_models for each in classes)
        models, table = (state.models, state.model) if picky else (("",), np.zeros_like(state.model))
        super().__init__(classes, state, models=models, table=table, unit=UNIT)
        self._grain = max(1, -(-max(node.cpu_milli for node in state.nodes) // STEPS))
        self._parts: Ints = np.concatenate(
            [_device_values(usable(classes, model), self.weight, self._grain).reshape(-1) for model in models]
        )

    def _of_devices(self, nodes: Ints, cpu: Ints, devices: Ints, free: Ints) -> Ints:
        share = cpu[:, None] * devices // (np.maximum(free, 1) * self._grain)[:, None]
        row = self._table[nodes][:, None] * (STEPS + 1) + np.minimum(share, STEPS)
        return np.asarray(self._parts[row * (WHOLE + 1) + devices])


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
