"""What plait's own policy is compared with: FGD, what FGD was compared with, first-fit, Ray Serve's two ways.

**Fragmentation gradient descent (FGD).** A task goes where fragmentation grows least. Weng et al., "Beware of
Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC 2023; the rule as their
simulator has it (github.com/hkust-adsl/kubernetes-scheduler-simulator, fgd_score.go): integer scores 0..100, the
classes that are 95 % of all tasks. Their scheduler is patched to break ties by a fixed order of nodes, where Kubernetes
draws one (`Ties`).

**What FGD was compared with**, by the formulae of its simulator (pkg/simulator/plugin). Devices: the fullest with room,
except for `RandomPolicy`. Constants are the simulator's.

**Ray Serve's ways**, as far as they can be told from outside. They see sums per node ("1.6 GPUs"), not devices. A node
whose sum suffices but whose devices do not cannot start the replica; Ray then spills it to another one, here the first
in order that can. Replicas come one by one, in order of arrival (Serve sorts a pending batch by size), and
`RaySpreadPolicy` counts all replicas of a node, not those of one deployment. [ray.serve._private.deployment_scheduler;
neither has been run on Ray itself.]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from plait_deploy.placement.device_tables import FragmentTables
from plait_deploy.placement.policies.scored import ScoredPolicy, Ties, leftover
from plait_deploy.placement.state import ClusterState, Ints, kind_of
from plait_deploy.placement.values import WHOLE, Task, TaskClass, TaskPlacement

COVERAGE = 0.95
"""`podPopularityThreshold` of the published runs."""
_CPU_MILLI, _GPU_MILLI = 128_000, 8_000


def commonest(classes: Sequence[TaskClass], coverage: float = COVERAGE) -> tuple[TaskClass, ...]:
    """Return the first classes, commonest first, until they have that share of all weights."""
    ordered = sorted(classes, key=lambda each: -each.weight)
    before = np.cumsum([0, *(each.weight for each in ordered)])
    return tuple(each for each, seen in zip(ordered, before, strict=False) if seen < coverage * before[-1])


def integer_scores(gain: Ints, weight: int) -> NDArray[np.int64]:
    """Return FGD's published score: int(100 sigmoid(gain in GPUs)), 0..100. One step is about 0.04 GPU near 0."""
    return np.asarray(100.0 / (1.0 + np.exp(gain / (-WHOLE * weight))), np.int64)


class FgdPolicy(ScoredPolicy):
    """FGD as published. `classes`: all of them; it looks at the commonest only."""

    def __init__(self, classes: Sequence[TaskClass], *, ties: Ties = Ties.FIXED, seed: int = 0) -> None:
        super().__init__(ties=ties, seed=seed)
        self._classes = commonest(classes)

    def begin(self, state: ClusterState) -> None:
        """Make the tables for the cluster."""
        self._tables = FragmentTables(self._classes, state)

    def score(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints | None]:
        """Score by the gain of the best device."""
        gain, device = self._tables.gain(state, task, nodes)
        return integer_scores(gain, self._tables.weight), device


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
            return state.best_fit(task, node)
        room = np.flatnonzero(state.devices[node] >= task.gpu_milli)
        return TaskPlacement(node=node, devices=(int(room[self._rng.integers(room.size)]),))


class _RayPolicy:
    """Takes the node of the highest rank among those whose sums suffice."""

    def _rank(self, state: ClusterState, task: Task) -> Ints:
        raise NotImplementedError

    def choose(self, state: ClusterState, task: Task) -> TaskPlacement | None:
        """Return the node of the highest rank, or the first that fits if that one's devices do not."""
        allowed = state.allows(task)
        fits = state.fits(task, np.arange(len(state.nodes)), allowed)
        first = int(fits.argmax())
        if not fits[first]:
            return None
        sums = (state.cpu >= task.cpu_milli) & (state.memory >= task.memory_mib) & (state.gpu_free >= task.total_milli)
        if allowed is not None:
            sums &= allowed
        node = int(np.where(sums, self._rank(state, task), np.iinfo(np.int64).min).argmax())
        if not fits[node]:
            node = first
        return state.best_fit(task, node)


class RayPackPolicy(_RayPolicy):
    """`RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY=1`: nodes in use first, then the least GPU, CPU and memory left."""

    _BITS: ClassVar[tuple[int, int]] = (46, 25)
    """Memory below 2^25 MiB, CPU below 2^21 milli-cores, GPU below 2^16: one int64 holds all three."""

    def _rank(self, state: ClusterState, task: Task) -> Ints:
        gpu, cpu = self._BITS
        left = (state.gpu_free - task.total_milli << gpu) + (state.cpu - task.cpu_milli << cpu) + state.memory
        return np.where(state.running.any(1), 0, np.int64(-1) << 62) - left


class RaySpreadPolicy(_RayPolicy):
    """Serve's default: the node with the fewest replicas."""

    def _rank(self, state: ClusterState, task: Task) -> Ints:
        return np.asarray(-state.running.sum(1))
