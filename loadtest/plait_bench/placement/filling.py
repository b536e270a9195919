"""Clusters that fill up (tasks of 130 % of all GPUs arrive, none departs), and one at a steady load, on the lists of
tasks of the FGD publication, in the format of Alibaba's `openb` trace (cluster-trace-gpu-v2023)."""

from __future__ import annotations

import csv
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from plait_bench.benchmark import Reading, ResultRow, Say, Workload, published, readings
from plait_bench.errors import BenchError
from plait_deploy.errors import PlacementError, TaskError
from plait_deploy.placement.device_tables import FragmentTables
from plait_deploy.placement.policies import POLICIES, make_policy
from plait_deploy.placement.policies.scored import Policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import ClusterNode, Task, TaskClass, TaskPlacement, classes_of

PUBLISHED = ("default", "gpushare100", "cpu050")
CONTENDERS = ("plait", "fgd", "first-fit", "best-fit", "ray-pack")
"""Who plays where tasks depart: the best of the others, and Ray's own."""
LOAD = 0.9
LIFETIMES = 6
"""A steady run's length in mean lifetimes of a task; the first half is not counted."""


def load(name: str, data: Path | None) -> tuple[list[ClusterNode], list[Task]]:
    """Read the nodes of the published cluster, and a list of tasks, sorted by name. Raises `SystemUnavailable` without
    the data folder, `BenchError` if the files are not as published."""
    folder = published(data, "fgd")
    try:
        nodes = [
            ClusterNode(
                name=row["sn"], cpu_milli=int(row["cpu_milli"]), memory_mib=int(row["memory_mib"]),
                gpus=int(row["gpu"]), gpu_model=row["model"],
            )
            for row in _rows(folder / "openb_node_list_gpu_node.csv")
        ]  # fmt: skip
        rows = sorted(_rows(folder / f"openb_pod_list_{name}.csv"), key=lambda row: row["name"])
        return nodes, [_task(row, gpus=int(row["num_gpu"])) for row in rows]
    except (OSError, ValueError, KeyError, PlacementError) as error:
        raise BenchError(f"{folder}, {name}: not as published: {error!r}") from error


def _task(row: Mapping[str, str], *, gpus: int) -> Task:
    """Return a task; `gpu_spec` names models, separated by `|`."""
    return Task(
        cpu_milli=int(row["cpu_milli"]), memory_mib=int(row["memory_mib"]), gpus=gpus,
        gpu_milli=int(row["gpu_milli"]) if gpus else 0,
        gpu_models=frozenset(filter(None, row["gpu_spec"].split("|"))),
    )  # fmt: skip


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, restval=""))


# ---- replays: until a cluster is full, and with departures at a steady load ------------------------------------------

SEEDS = range(42, 52)
"""The seeds of the published runs."""
_INFLATED = 1.3
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
    """Return the tasks in random order, then random ones of them until the next would pass 130 % of `total_milli`.

    A list that asks for more than that already loses random tasks instead (`TunePodsByNodeTotalResource`). Raises
    `TaskError` if no task has a GPU.
    """
    rng = np.random.default_rng([seed, 1])
    order = [tasks[at] for at in rng.permutation(len(tasks))]
    asked, wanted = sum(task.total_milli for task in tasks), _INFLATED * total_milli
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


# ---- the workloads ---------------------------------------------------------------------------------------------------


class Filling(Workload):
    """A list at 130 % load, replayed by each policy; a round is a seed. Shares are computed."""

    metrics: Mapping[str, str] = dict.fromkeys(("allocated_pct", "stranded_pct", "allocated_mean_pct"), "% of GPUs")
    pairs = ()
    systems: tuple[str, ...] = POLICIES
    classes: tuple[TaskClass, ...]

    def __init__(self, name: str, data: Path | None) -> None:
        self.name, self._data = name, data
        self._allocated: dict[str, list[float]] = {}

    def prepare(self, say: Say) -> None:
        """Load the list. Raises `SystemUnavailable` without its data."""
        self.nodes, self.tasks = load(self.name if self.name in PUBLISHED else PUBLISHED[0], self._data)
        self.classes = classes_of(self.tasks)

    def take(self, system: str, number: int) -> Sequence[Reading]:
        """Play a policy on a fresh cluster. Beyond the published seeds they go on."""
        try:
            replay = self.replay(system, SEEDS[0] + number - 1)
        except PlacementError as error:
            raise BenchError(f"{self.name}: {error}") from error
        shares = {"allocated_pct": 100 * replay.allocated, "stranded_pct": 100 * replay.stranded}
        self._allocated.setdefault(system, []).append(shares["allocated_pct"])
        return readings(shares, kind="modelled")

    def replay(self, system: str, seed: int) -> Replay:
        """Fill a cluster by a policy."""
        state = ClusterState(shuffled(self.nodes, seed))
        tasks = inflated(self.tasks, state.total_milli, seed)
        return fill(state, tasks, make_policy(system, self.classes, seed=seed), self.classes)

    def conclude(self) -> Sequence[ResultRow]:
        """Give the means over all seeds, which is what was published."""
        return [
            replace(
                self.row(system, "allocated_mean_pct", *taken), value=fmean(taken), p20=min(taken), p80=max(taken),
                kind="modelled",
            )
            for system, taken in self._allocated.items()
        ]  # fmt: skip


class Departures(Filling):
    """Random tasks of a list that would hold 90 % of all GPUs: they arrive and depart.

    Five seeds: a run is four times as many decisions as one that fills the cluster, and itself a mean over time.
    """

    systems = CONTENDERS
    most_rounds = 5

    def replay(self, system: str, seed: int) -> Replay:
        """Run the cluster for some lifetimes."""
        state = ClusterState(shuffled(self.nodes, seed))
        there = LOAD * state.total_milli * len(self.tasks) / max(1, sum(task.total_milli for task in self.tasks))
        policy = make_policy(system, self.classes, seed=seed)
        arrivals = int(LIFETIMES * there)
        return churn(state, self.tasks, policy, self.classes, seed=seed, load=LOAD, arrivals=arrivals)
