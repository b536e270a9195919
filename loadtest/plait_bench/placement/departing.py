"""Clusters at a steady load: tasks arrive and depart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from plait_bench.errors import BenchError
from plait_bench.placement.filling import Simulated
from plait_bench.placement.lists import CONTENDERS, Trace
from plait_deploy.placement.errors import PlacementError
from plait_deploy.placement.policies import make_policy
from plait_deploy.placement.simulator import Replay, churn, shuffled
from plait_deploy.placement.state import ClusterState

LOAD = 0.9
LIFETIMES = 6
"""A run's length in mean lifetimes of a task; the first half is not counted."""


class Departures(Simulated):
    """Random tasks of a list that would hold 90 % of all GPUs.

    Five seeds: a run is four times as many decisions as one that fills the cluster, and itself a mean over time.
    """

    rounds: ClassVar[Mapping[str, int]] = dict.fromkeys(CONTENDERS, 5)

    def __init__(self, name: str, read: Callable[[], Trace]) -> None:
        super().__init__(name, read, CONTENDERS)

    def replay(self, system: str, seed: int) -> Replay:
        """Run the cluster for some lifetimes. Raises `BenchError`."""
        state = ClusterState(shuffled(self.trace.nodes, seed))
        tasks = self.trace.tasks
        there = LOAD * state.total_milli * len(tasks) / max(1, sum(task.total_milli for task in tasks))
        try:
            policy = make_policy(system, self.classes, seed=seed)
            arrivals = int(LIFETIMES * there)
            return churn(state, tasks, policy, self.classes, seed=seed, load=LOAD, arrivals=arrivals)
        except PlacementError as error:
            raise BenchError(f"{self.name}: {error}") from error
