"""Replays lists of tasks on a cluster: inflated until it is full, and with departures at a steady load."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plait_deploy.errors import TaskError
from plait_deploy.placement.fragments import FragmentTables
from plait_deploy.placement.policies.protocols import Policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import ClusterNode, Task, TaskClass, TaskPlacement

SEEDS = range(42, 52)
"""The seeds of the published runs."""
LOAD = 1.3
"""GPU demand of an inflated list, as a share of the cluster's."""


class Replay(NamedTuple):
    """What a run ended with. Shares are of all GPUs of the cluster.

    `allocated`: GPUs given to tasks; `stranded`: idle GPU that the average task with GPUs could not use.
    """

    allocated: float
    stranded: float


def shuffled(nodes: Sequence[ClusterNode], seed: int) -> list[ClusterNode]:
    """Return the nodes in a random order: ties that fall to an order should not fall to the list's."""
    return [nodes[at] for at in np.random.default_rng([seed, 0]).permutation(len(nodes))]


def inflated(tasks: Sequence[Task], total_milli: int, seed: int) -> list[Task]:
    """Return the tasks in random order, then random ones of them until the next would pass `LOAD` x `total_milli`.

    A list that asks for more than that already loses random tasks instead (`TunePodsByNodeTotalResource`). Raises
    `TaskError` if no task has a GPU.
    """
    rng = np.random.default_rng([seed, 1])
    order = [tasks[at] for at in rng.permutation(len(tasks))]
    asked, wanted = sum(task.total_milli for task in tasks), LOAD * total_milli
    if not asked:
        raise TaskError("a list of tasks without GPUs cannot be inflated to a load of GPUs")
    if asked > wanted:
        while asked > wanted:
            asked -= order.pop(int(rng.integers(len(order)))).total_milli
        return order
    while True:
        task = tasks[int(rng.integers(len(tasks)))]
        if asked + task.total_milli > wanted:
            return order
        asked += task.total_milli
        order.append(task)


def fill(state: ClusterState, tasks: Sequence[Task], policy: Policy, classes: Sequence[TaskClass]) -> Replay:
    """Place one task after the other; nothing departs, and what fits nowhere is dropped. Changes the state."""
    for task in tasks:
        if (at := policy.choose(state, task)) is not None:
            state.place(task, at)
    return _shares(state, _tables(state, classes))


def churn(
    state: ClusterState,
    tasks: Sequence[Task],
    policy: Policy,
    classes: Sequence[TaskClass],
    *,
    seed: int,
    load: float,
    arrivals: int,
) -> Replay:
    """Random tasks arrive (Poisson) and depart (exponential times) so that they would hold `load` of all GPUs.

    Shares are means over time in the second half of the arrivals; in the first the cluster fills. What fits nowhere is
    dropped. Changes the state.
    """
    rng = np.random.default_rng([seed, 2])
    drawn = rng.integers(len(tasks), size=arrivals)
    gpus = float(np.mean([task.total_milli for task in tasks]))
    # Little's law: tasks there = arrivals per lifetime; a lifetime is 1.
    every = gpus / (load * state.total_milli)
    arrives, lives = np.cumsum(rng.exponential(every, arrivals)), rng.exponential(1.0, arrivals)
    leaving: list[tuple[float, int, Task, TaskPlacement]] = []
    tables = _tables(state, classes)
    seen: list[Replay] = []
    for number, (pick, now) in enumerate(zip(drawn.tolist(), arrives.tolist(), strict=True)):
        while leaving and leaving[0][0] <= now:
            _, _, gone, was = heapq.heappop(leaving)
            state.release(gone, was)
        task = tasks[pick]
        if (at := policy.choose(state, task)) is not None:
            state.place(task, at)
            heapq.heappush(leaving, (now + float(lives[number]), number, task, at))
        if number >= arrivals // 2 and (number - arrivals // 2) % _LOOK == 0:
            seen.append(_shares(state, tables))
    return Replay(*np.mean(seen, axis=0).tolist())


_LOOK = 100
"""Arrivals between two looks at a cluster with departures (Poisson arrivals see averages over time). Of 7,500 tasks on
the public cluster, not many are others after so few."""


def _shares(state: ClusterState, tables: FragmentTables) -> Replay:
    stranded = float(tables.fragments(state).sum()) / tables.weight / state.total_milli
    return Replay(1 - int(state.gpu_free.sum()) / state.total_milli, stranded)


def _tables(state: ClusterState, classes: Sequence[TaskClass]) -> FragmentTables:
    return FragmentTables([each for each in classes if each.task.gpus], state)
