"""Fragmentation gradient descent (FGD): a task goes where fragmentation grows least.

Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC
2023; the rule as their simulator has it (github.com/hkust-adsl/kubernetes-scheduler-simulator, fgd_score.go): integer
scores 0..100, the classes that are 95 % of all tasks. Their scheduler is patched to break ties by a fixed order of
nodes, where Kubernetes draws one (`Ties`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait_deploy.placement.fragments import FragmentTables, integer_scores
from plait_deploy.placement.policies.scored import ScoredPolicy, Ties
from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import Task, TaskClass

COVERAGE = 0.95
"""`podPopularityThreshold` of the published runs."""


def commonest(classes: Sequence[TaskClass], coverage: float = COVERAGE) -> tuple[TaskClass, ...]:
    """Return the first classes, commonest first, until they have that share of all weights."""
    ordered = sorted(classes, key=lambda each: -each.weight)
    before = np.cumsum([0, *(each.weight for each in ordered)])
    return tuple(each for each, seen in zip(ordered, before, strict=False) if seen < coverage * before[-1])


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
