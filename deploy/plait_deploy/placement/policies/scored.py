"""The seam of placement policies, and those that score each node by what is free on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import Task, TaskPlacement


class Policy(Protocol):
    """Chooses a node and devices for one task at a time.

    It never changes the state. What it chooses fits; it finds a place whenever there is one. A seed fixes what it does.
    """

    def choose(self, state: ClusterState, task: Task) -> TaskPlacement | None:
        """Return where the task goes, or None if it fits nowhere now."""


class Ties(StrEnum):
    """Who wins among nodes of equal score: the first in order, a random one, or the one with the least left over."""

    FIXED = "fixed"
    RANDOM = "random"
    BEST_FIT = "best-fit"


class ScoredPolicy(ABC):
    """Takes the node of the highest score; ties by the rule given."""

    def __init__(self, *, ties: Ties = Ties.FIXED, seed: int = 0) -> None:
        self._ties, self._rng = ties, np.random.default_rng(seed)
        self._state: ClusterState | None = None

    @abstractmethod
    def score(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints | None]:
        """Score `nodes` (n,), which the task fits: int64, higher is better; and the device for a part of one (None:
        the fullest with room)."""

    def begin(self, state: ClusterState) -> None:  # noqa: B027 - most keep nothing per cluster
        """Prepare for a state that has not been seen before."""

    def choose(self, state: ClusterState, task: Task) -> TaskPlacement | None:
        """Return the node of the highest score, or None if the task fits nowhere now."""
        if state is not self._state:
            self._state = state
            self.begin(state)
        there = state.roomy(task)
        if not there.size:
            return None
        score, device = self.score(state, task, there)
        at = self._pick(state, task, there, score)
        if device is not None and task.is_share:
            return TaskPlacement(node=int(there[at]), devices=(int(device[at]),))
        return state.best_fit(task, int(there[at]))

    def _pick(self, state: ClusterState, task: Task, nodes: Ints, score: Ints) -> int:
        """Return which of the nodes it is."""
        if self._ties is Ties.FIXED:
            return int(score.argmax())
        equal = np.flatnonzero(score == score.max())
        if self._ties is Ties.RANDOM:
            return int(self._rng.choice(equal))
        return int(equal[leftover(state, task, nodes[equal]).argmin()])


# FGD's simulator measures nodes by its largest (pkg/type/open-gpu-share/utils/const.go): 128 cores, 8 GPUs.
_CPU_MILLI, _GPU_MILLI = 128_000, 8_000


def leftover(state: ClusterState, task: Task, nodes: Ints) -> NDArray[np.float64]:
    """Return what best-fit minimises (n,): the mean of CPU and GPU left, each as a share of a large node's."""
    cpu = (state.cpu[nodes] - task.cpu_milli) / _CPU_MILLI
    gpu = (state.gpu_free[nodes] - task.total_milli) / _GPU_MILLI
    return np.asarray(0.5 * cpu + 0.5 * gpu)
