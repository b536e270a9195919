"""plait's own policy. Its score depends on whether the cluster fills up, or its GPUs turn over.

**Fills up**: few of the tasks that came have left, or CPU is what runs out. What is left over of a device stays, and
may be filled by many tasks to come: a task goes where the least of what will be used is lost (`expected_use.py`).

**Turns over**: departures make new leftovers as fast as arrivals fill old ones, and free CPU and GPU are never used up.
What counts is that the next task can use them: a task goes where fragmentation grows least (`fragments.py`). A class
weighs as much as it has tasks, times the devices that one asks for: what is lost if it is refused.

Against FGD, in both: it knows all classes, not the commonest 95 %, and its scores are not rounded, so equal scores are
equal leftovers; ties go to the node with the least left over. In the first, it also counts what later tasks will still
take, and sees CPU run out before it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait_deploy.placement.expected_use import ExpectedUse
from plait_deploy.placement.fragments import FragmentTables
from plait_deploy.placement.policies.scored import ScoredPolicy, Ties
from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import Task, TaskClass

TURNS_OVER = 0.05
"""The cluster turns over once so many of the tasks that were ever placed have left (`ClusterState.turnover`). So low,
because the first rule also puts small tasks on the few nodes that rare large ones need, and with departures these nodes
never become free again."""


class PlaitPolicy(ScoredPolicy):
    """The policy of the module docstring."""

    def __init__(self, classes: Sequence[TaskClass], *, ties: Ties = Ties.BEST_FIT, seed: int = 0) -> None:
        super().__init__(ties=ties, seed=seed)
        self._classes = tuple(classes)

    def begin(self, state: ClusterState) -> None:
        """Make the tables for the cluster."""
        weighed = [replace(each, weight=each.weight * max(1, each.task.gpus)) for each in self._classes]
        self._tables = (ExpectedUse(self._classes, state), FragmentTables(weighed, state))

    def regime(self, state: ClusterState) -> int:
        """Return 1 if the cluster's GPUs turn over, else 0."""
        return int(state.turnover >= TURNS_OVER and not state.cpu_scarcer)

    def score(self, state: ClusterState, task: Task, nodes: Ints) -> tuple[Ints, Ints | None]:
        """Score by the gain of the best device."""
        return self._tables[self.regime(state)].gain(state, task, nodes)
