"""plait's own policy: a task goes where the least of what will be used is lost (`prospects.py`).

Against FGD: it knows all classes, not the commonest 95 %; it counts what later tasks will still take of a leftover, not
whether the next one fits; and it sees CPU run out before it has. Ties go to the node with the least left over.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait_deploy.placement.policies.scored import ScoredPolicy, Ties
from plait_deploy.placement.prospects import ProspectTables
from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import Task, TaskClass


class PlaitPolicy(ScoredPolicy):
    """The policy of the module docstring."""

    def __init__(self, classes: Sequence[TaskClass], *, ties: Ties = Ties.BEST_FIT, seed: int = 0) -> None:
        super().__init__(ties=ties, seed=seed)
        self._classes = tuple(classes)

    def begin(self, state: ClusterState) -> None:
        """Make the tables for the cluster."""
        self._tables = ProspectTables(self._classes, state)

    def score(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints | None]:
        """Score by the gain of the best device."""
        return self._tables.gain(state, task, nodes)
