"""Clusters that fill up (tasks of 130 % of all GPUs arrive, none departs), and one at a steady load, on the lists of
tasks of the FGD publication, in the format of Alibaba's `openb` trace (cluster-trace-gpu-v2023)."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from plait_bench.benchmark import Reading, ResultRow, Say, Workload, published, readings
from plait_bench.errors import BenchError
from plait_bench.placement.simulator import SEEDS, Replay, churn, fill, inflated, shuffled
from plait_deploy.errors import PlacementError
from plait_deploy.placement.policies import POLICIES, make_policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import ClusterNode, Task, TaskClass, classes_of

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
