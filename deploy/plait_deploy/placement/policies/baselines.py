"""The policies that FGD was compared with, by the formulae of its simulator (pkg/simulator/plugin), and first-fit.

Devices: the fullest with room, except for `RandomPolicy`. Constants are the simulator's.
"""

from __future__ import annotations

import numpy as np

from plait_deploy.placement.policies.scored import ScoredPolicy, leftover
from plait_deploy.placement.state import ClusterState, Ints, kind_of
from plait_deploy.placement.values import WHOLE, Task, TaskPlacement

_CPU_MILLI, _GPU_MILLI = 128_000, 8_000


class FirstFitPolicy:
    """The first node in order."""

    def choose(self, state: ClusterState, task: Task) -> TaskPlacement | None:
        """Return it."""
        return state.first_fit(task)


class BestFitPolicy(ScoredPolicy):
    """The node with the least left over.

    Published scores are whole numbers of 100 and stretched to 0..100 over the nodes that fit, which keeps their order.
    """

    def score(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints | None]:
        """Score int(100 (1 - left over))."""
        return (100.0 * (1.0 - leftover(state, task, nodes))).astype(np.int64), None


class DotProductPolicy(ScoredPolicy):
    """The node whose free vector has the smallest product with the request (`-dimext merge -norm max`)."""

    def score(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints | None]:
        """Score int(100 (1 - (c_n D / 128000^2 + G_n G / 8000^2) / 2))."""
        cpu = state.cpu[nodes] * (task.cpu_milli / _CPU_MILLI**2)
        gpu = state.gpu_free[nodes] * (task.total_milli / _GPU_MILLI**2)
        return (100.0 * (1.0 - (cpu + gpu) / 2)).astype(np.int64), None


class GpuPackingPolicy(ScoredPolicy):
    """Devices in use first, then free ones of nodes in use, then idle nodes."""

    def score(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints | None]:
        """Score 50..100, 33..50, 0..33 for the three cases; tasks without GPUs 0."""
        if not task.gpus:
            return np.zeros(len(nodes), np.int64), None
        whole = state.whole[nodes]
        idle = np.maximum(33 - whole, whole)
        used = np.full(len(nodes), max(50 - task.gpus, 33))
        if task.is_share:
            devices = state.devices[nodes]
            room = np.where(devices >= task.gpu_milli, devices, WHOLE).min(1)
            # Whole numbers at both divisions, as the simulator has them.
            used = np.where(room < WHOLE, np.maximum(100 - room * 100 // WHOLE // 10, 50), used)
        return np.where(whole == state.gpus[nodes], idle, used), None


class GpuClusteringPolicy(ScoredPolicy):
    """Nodes that run only tasks of the same kind first, then mixed ones, idle ones, and other kinds."""

    def score(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints | None]:
        """Score in bands of 25, the fuller the higher; tasks without GPUs 0."""
        if not task.gpus:
            return np.zeros(len(nodes), np.int64), None
        kinds = state.running[nodes, 1:] > 0
        same, count = kinds[:, kind_of(task) - 1], kinds.sum(1)
        band = np.where(same, np.where(count == 1, 75, 50), np.where(count == 0, 25, 0))
        return 25 * (_GPU_MILLI - state.gpu_free[nodes]) // _GPU_MILLI + band, None


class RandomPolicy:
    """Any node that fits, and any device of it with room."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def choose(self, state: ClusterState, task: Task) -> TaskPlacement | None:
        """Draw a node, then a device."""
        there = state.roomy(task)
        if not there.size:
            return None
        node = int(there[self._rng.integers(there.size)])
        if not task.is_share:
            return TaskPlacement(node=node, devices=state.best_fit_devices(task, node))
        room = np.flatnonzero(state.devices[node] >= task.gpu_milli)
        return TaskPlacement(node=node, devices=(int(room[self._rng.integers(room.size)]),))
