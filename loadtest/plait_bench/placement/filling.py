"""Clusters that fill up (tasks of 130 % of all GPUs arrive, none departs), and one at a steady load, on the lists of
tasks of the FGD publication, in the format of Alibaba's `openb` trace (cluster-trace-gpu-v2023)."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from plait_bench.benchmark import Metric, Reading, ResultRow, Rounds, Say, Subject, Workload
from plait_bench.errors import BenchError, SystemUnavailable
from plait_bench.placement.simulator import SEEDS, Replay, churn, fill, inflated, shuffled
from plait_deploy.placement.errors import PlacementError
from plait_deploy.placement.policies import OURS, POLICIES, make_policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import ClusterNode, Task, TaskClass, classes_of

PUBLISHED = ("default", "gpushare100", "cpu050")
CONTENDERS = ("plait", "fgd", "first-fit", "best-fit", "ray-pack")
"""Who plays where tasks depart: the best of the others, and Ray's own."""
_PUBLISHED_NAMES: Mapping[str, str] = {
    "01-Random": "random",
    "02-DotProd": "dot-product",
    "03-GpuClustering": "gpu-clustering",
    "04-GpuPacking": "gpu-packing",
    "05-BestFit": "best-fit",
    "06-FGD": "fgd",
}
_NODES = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_TASKS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec")

LOAD = 0.9
LIFETIMES = 6
"""A steady run's length in mean lifetimes of a task; the first half is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskList:
    """A cluster's nodes and a list of tasks."""

    nodes: tuple[ClusterNode, ...]
    tasks: tuple[Task, ...]


def load(name: str, data: Path | None) -> TaskList:
    """Read a published list. Raises `SystemUnavailable` without the data folder, `BenchError` if the files are not as
    published."""
    folder = _folder(data)
    nodes = read_nodes(folder / "openb_node_list_gpu_node.csv")
    return TaskList(nodes=tuple(nodes), tasks=tuple(read_tasks(folder / f"openb_pod_list_{name}.csv")))


def published_means(name: str, data: Path | None) -> Mapping[str, float]:
    """Return the published allocation of a list at 130 % load, mean of the seeds, by policy. Raises `BenchError`."""
    values: dict[str, list[float]] = {}
    for _, row in _rows(_folder(data) / "published_allocation.csv", ("workload", "policy", "alloc_pct_at_130")):
        if row["workload"] == f"openb_pod_list_{name}":
            values.setdefault(_PUBLISHED_NAMES[row["policy"]], []).append(float(row["alloc_pct_at_130"]))
    return {policy: fmean(found) for policy, found in values.items()}


def _folder(data: Path | None) -> Path:
    if data is None:
        raise SystemUnavailable("placement needs the folder with the published lists (--data)")
    if not (data / "fgd").is_dir():
        raise SystemUnavailable(f"placement: {data} has no folder fgd")
    return data / "fgd"


def read_nodes(path: Path) -> list[ClusterNode]:
    """Read a list of nodes. Raises `BenchError` naming the file, and the line where there is one to name."""
    nodes = []
    for number, row in _rows(path, _NODES):
        try:
            nodes.append(
                ClusterNode(
                    name=row["sn"], cpu_milli=int(row["cpu_milli"]), memory_mib=int(row["memory_mib"]),
                    gpus=int(row["gpu"]), gpu_model=row["model"],
                )
            )  # fmt: skip
        except (ValueError, PlacementError) as error:
            raise BenchError(f"{path}, line {number}: not a node ({error})") from error
    return nodes


def read_tasks(path: Path) -> list[Task]:
    """Read a list of tasks, sorted by name. `gpu_spec` names models, separated by `|`. Raises `BenchError`."""
    tasks = []
    for number, row in _rows(path, _TASKS):
        try:
            gpus, models = int(row["num_gpu"]), frozenset(filter(None, row["gpu_spec"].split("|")))
            task = Task(
                cpu_milli=int(row["cpu_milli"]), memory_mib=int(row["memory_mib"]), gpus=gpus,
                gpu_milli=int(row["gpu_milli"]) if gpus else 0, gpu_models=models,
            )  # fmt: skip
            tasks.append((row["name"], task))
        except (ValueError, PlacementError) as error:
            raise BenchError(f"{path}, line {number}: not a task ({error})") from error
    return [task for _, task in sorted(tasks, key=lambda named: named[0])]


def _rows(path: Path, columns: tuple[str, ...]) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a CSV with their line numbers. Raises `BenchError` if a column is missing, or all rows are."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines, restval="")
            if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                raise BenchError(f"{path} lacks the column {missing[0]}; it needs {', '.join(columns)}")
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise BenchError(f"{path} has no rows")
    return rows


class Filling(Workload):
    """A list at 130 % load, replayed by each policy; a round is a seed. Shares are computed."""

    metrics: Mapping[str, Metric] = {
        "allocated_pct": Metric(unit="% of GPUs", better="higher"),
        "stranded_pct": Metric(unit="% of GPUs", better="lower"),
        "refused_pct": Metric(unit="% of tasks", better="lower"),
    }
    ours = OURS
    systems: tuple[str, ...] = POLICIES
    trace: TaskList
    classes: tuple[TaskClass, ...]

    def __init__(self, name: str, data: Path | None) -> None:
        self.name, self._data = name, data
        self._seen: dict[str, list[Replay]] = {}

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Load the list. Raises `SystemUnavailable` without its data."""
        self.trace = load(self.name if self.name in PUBLISHED else PUBLISHED[0], self._data)
        self.classes = classes_of(self.trace.tasks)
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open a policy: every round gets a fresh one, and a fresh cluster. Beyond the published seeds they go on."""
        yield Rounds(lambda number: self._readings(system, SEEDS[0] + number - 1))

    def _readings(self, system: str, seed: int) -> Sequence[Reading]:
        try:
            replay = self.replay(system, seed)
        except PlacementError as error:
            raise BenchError(f"{self.name}: {error}") from error
        self._seen.setdefault(system, []).append(replay)
        shares = {
            "allocated_pct": replay.allocated,
            "stranded_pct": replay.stranded,
            "refused_pct": replay.refused / replay.tasks,
        }
        return [Reading(metric=metric, value=100 * share, kind="modelled") for metric, share in shares.items()]

    def replay(self, system: str, seed: int) -> Replay:
        """Fill a cluster by a policy."""
        state = ClusterState(shuffled(self.trace.nodes, seed))
        tasks = inflated(self.trace.tasks, state.total_milli, seed)
        return fill(state, tasks, make_policy(system, self.classes, seed=seed), self.classes)

    def conclude(self) -> Sequence[ResultRow]:
        """Give the means over all seeds, which is what was published, beside the published ones."""
        values = {
            (system, f"{metric}_mean_pct"): [100 * getattr(replay, metric) for replay in seen]
            for system, seen in self._seen.items()
            for metric in ("allocated", "stranded")
        }
        if self.name in PUBLISHED:
            means = published_means(self.name, self._data)
            values |= {(system, "published_mean_pct"): [means[system]] for system in self._seen if system in means}
        return [
            ResultRow(
                system=system, workload=self.name, metric=metric, unit="% of GPUs", value=fmean(taken), p20=min(taken),
                p80=max(taken), n=len(taken), kind="modelled", rounds=tuple(taken),
            )
            for (system, metric), taken in values.items()
        ]  # fmt: skip


class Departures(Filling):
    """Random tasks of a list that would hold 90 % of all GPUs: they arrive and depart.

    Five seeds: a run is four times as many decisions as one that fills the cluster, and itself a mean over time.
    """

    systems = CONTENDERS
    rounds: ClassVar[Mapping[str, int]] = dict.fromkeys(CONTENDERS, 5)

    def replay(self, system: str, seed: int) -> Replay:
        """Run the cluster for some lifetimes."""
        state = ClusterState(shuffled(self.trace.nodes, seed))
        tasks = self.trace.tasks
        there = LOAD * state.total_milli * len(tasks) / max(1, sum(task.total_milli for task in tasks))
        policy = make_policy(system, self.classes, seed=seed)
        arrivals = int(LIFETIMES * there)
        return churn(state, tasks, policy, self.classes, seed=seed, load=LOAD, arrivals=arrivals)


WORKLOADS: Mapping[str, Callable[[str, Path | None], Workload]] = {
    **dict.fromkeys(PUBLISHED, Filling),
    "departures": Departures,
}
"""How the workload of each name is made."""
