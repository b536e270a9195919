"""The seam of placement policies, and those that score each node by what is free on it and remember scores until the
node changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import Task, TaskPlacement

NO_ROOM = np.iinfo(np.int64).min
REMEMBERED = 512
"""Tasks whose scores are kept, 16 bytes a node each: more than the distinct ones of the public lists (about 150, and
300 with the groups of the recommendation services)."""


class Policy(Protocol):
    """Chooses a node and devices for one task at a time.

    It never changes the state. What it chooses fits; it finds a place whenever there is one. It may remember scores of
    one state between calls, and notices by `touched` what has changed there. A seed fixes what it does.
    """

    def choose(self, state: ClusterState, task: Task) -> TaskPlacement | None:
        """Return where the task goes, or None if it fits nowhere now."""


class Ties(StrEnum):
    """Who wins among nodes of equal score: the first in order, a random one, or the one with the least left over."""

    FIXED = "fixed"
    RANDOM = "random"
    BEST_FIT = "best-fit"


@dataclass(slots=True)
class _Scores:
    """Scores of one task: (N,) each, right for nodes not touched after `clock`."""

    score: Ints
    device: Ints
    allowed: NDArray[np.bool_] | None
    clock: int


class ScoredPolicy(ABC):
    """Takes the node of the highest score; ties by the rule given."""

    def __init__(self, *, ties: Ties = Ties.FIXED, seed: int = 0) -> None:
        self._ties, self._rng = ties, np.random.default_rng(seed)
        self._state: ClusterState | None = None
        self._regime = 0
        self._known: OrderedDict[Task, _Scores] = OrderedDict()

    @abstractmethod
    def score(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints | None]:
        """Score `nodes` (n,), which the task fits: int64, higher is better; and the device for a part of one (None:
        the fullest with room)."""

    def begin(self, state: ClusterState) -> None:  # noqa: B027 - most keep nothing per cluster
        """Prepare for a state that has not been seen before."""

    def regime(self, state: ClusterState) -> int:
        """Return which of its rules the policy follows now: scores of another one are forgotten. Most have one."""
        return 0

    def choose(self, state: ClusterState, task: Task) -> TaskPlacement | None:
        """Return the node of the highest score, or None if the task fits nowhere now."""
        known = self._fresh(state, task)
        node = self._pick(state, task, known)
        if known.score[node] == NO_ROOM:
            return None
        if task.is_share and (device := int(known.device[node])) >= 0:
            return TaskPlacement(node=node, devices=(device,))
        return state.best_fit(task, node)

    def _fresh(self, state: ClusterState, task: Task) -> _Scores:
        if state is not self._state:
            self._state = state
            self._known.clear()
            self.begin(state)
        if (regime := self.regime(state)) != self._regime:
            self._regime = regime
            self._known.clear()
        known = self._known.get(task)
        if known is None:
            count = len(state.nodes)
            known = _Scores(np.full(count, NO_ROOM), np.full(count, -1), state.allows(task), -1)
            self._known[task] = known
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(task)
        changed = np.flatnonzero(state.touched > known.clock)
        if changed.size:
            self._update(state, task, known, changed)
        known.clock = state.clock
        return known

    def _update(self, state: ClusterState, task: Task, known: _Scores, changed: Ints) -> None:
        fits = state.fits(task, changed, known.allowed)
        known.score[changed] = NO_ROOM
        nodes = changed[fits]
        if nodes.size:
            score, device = self.score(state, task, nodes)
            known.score[nodes] = score
            if device is not None:
                known.device[nodes] = device

    def _pick(self, state: ClusterState, task: Task, known: _Scores) -> int:
        first = int(known.score.argmax())
        if self._ties is Ties.FIXED:
            return first
        equal = np.flatnonzero(known.score == known.score[first])
        if self._ties is Ties.RANDOM:
            return int(self._rng.choice(equal))
        return int(equal[leftover(state, task, equal).argmin()])


# FGD's simulator measures nodes by its largest (pkg/type/open-gpu-share/utils/const.go): 128 cores, 8 GPUs.
_CPU_MILLI, _GPU_MILLI = 128_000, 8_000


def leftover(state: ClusterState, task: Task, nodes: Ints) -> NDArray[np.float64]:
    """Return what best-fit minimises (n,): the mean of CPU and GPU left, each as a share of a large node's."""
    cpu = (state.cpu[nodes] - task.cpu_milli) / _CPU_MILLI
    gpu = (state.gpu_free[nodes] - task.total_milli) / _GPU_MILLI
    return np.asarray(0.5 * cpu + 0.5 * gpu)
