"""The lists of tasks: those published, and others made from them to see whether a policy only knows the published."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from plait_bench.errors import BenchError, SystemUnavailable
from plait_deploy.placement.errors import TraceError
from plait_deploy.placement.trace import read_nodes, read_tasks
from plait_deploy.placement.values import WHOLE, ClusterNode, Task

PUBLISHED = ("default", "gpushare100", "cpu050")
CONTENDERS = ("plait", "fgd", "first-fit", "best-fit", "ray-pack")
"""Who plays on the lists that were made: the best of the others, and Ray's own."""
_PUBLISHED_NAMES: Mapping[str, str] = {
    "01-Random": "random",
    "02-DotProd": "dot-product",
    "03-GpuClustering": "gpu-clustering",
    "04-GpuPacking": "gpu-packing",
    "05-BestFit": "best-fit",
    "06-FGD": "fgd",
}
_DRAWN_WITH = 7
"""The seed that made the lists; not one of the rounds'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A cluster's nodes and a list of tasks."""

    nodes: tuple[ClusterNode, ...]
    tasks: tuple[Task, ...]


def load(name: str, data: Path | None) -> Trace:
    """Read or make a list, by its workload's name. Raises `SystemUnavailable` without the data folder, `BenchError` if
    the files are not as published."""
    folder = _folder(data)
    published = name if name in PUBLISHED else PUBLISHED[0]
    try:
        nodes = read_nodes(folder / "openb_node_list_gpu_node.csv")
        tasks = read_tasks(folder / f"openb_pod_list_{published}.csv")
    except TraceError as error:
        raise BenchError(str(error)) from error
    if name not in PUBLISHED:
        tasks = list(MADE[name](tasks, np.random.default_rng(_DRAWN_WITH)))
    return Trace(nodes=tuple(nodes), tasks=tuple(tasks))


def published_means(name: str, data: Path | None) -> Mapping[str, float]:
    """Return the published allocation of a list at 130 % load, mean of the seeds, by policy. Raises `BenchError`."""
    path = _folder(data) / "published_allocation.csv"
    values: dict[str, list[float]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                if row["workload"] == f"openb_pod_list_{name}":
                    values.setdefault(_PUBLISHED_NAMES[row["policy"]], []).append(float(row["alloc_pct_at_130"]))
    except (OSError, KeyError, ValueError) as error:
        raise BenchError(f"{path} is not as published: {error!r}") from error
    return {policy: float(np.mean(found)) for policy, found in values.items()}


def _folder(data: Path | None) -> Path:
    if data is None:
        raise SystemUnavailable("placement needs the folder with the published lists (--data)")
    return data / "fgd"


def _drawn(tasks: Sequence[Task], count: int, rng: np.random.Generator) -> list[Task]:
    return [tasks[at] for at in rng.integers(len(tasks), size=count)]


def _more_cpu_tasks(tasks: Sequence[Task], rng: np.random.Generator) -> list[Task]:
    """2.5 times as many tasks without GPUs: CPU runs out before GPUs do."""
    cpu = [task for task in tasks if not task.gpus]
    return [*(task for task in tasks if task.gpus), *_drawn(cpu, 5 * len(cpu) // 2, rng)]


def _hungry(tasks: Sequence[Task], _: np.random.Generator) -> list[Task]:
    """Tasks with GPUs ask for half as much CPU again."""
    return [replace(task, cpu_milli=3 * task.cpu_milli // 2) if task.gpus else task for task in tasks]


def _more_gpus(tasks: Sequence[Task], rng: np.random.Generator) -> list[Task]:
    """About half of the demand in tasks of 2, 4 and 8 GPUs."""
    several = [task for task in tasks if task.gpus > 1]
    one = [task for task in tasks if task.gpus == 1 and not task.is_share]
    rest = [task for task in tasks if not task.gpus or task.is_share]
    return [*rest, *_drawn(one, 800, rng), *_drawn(several, 500, rng)]


def _shifted(tasks: Sequence[Task], rng: np.random.Generator) -> list[Task]:
    """Each part of a GPU up to 0.1 larger or smaller: several hundred classes."""
    moved = np.clip([task.gpu_milli + int(rng.integers(-100, 101)) for task in tasks], 50, WHOLE).tolist()
    return [replace(task, gpu_milli=milli) if task.is_share else task for task, milli in zip(tasks, moved, strict=True)]


def _picky(tasks: Sequence[Task], rng: np.random.Generator) -> list[Task]:
    """A third of the tasks wants one of two GPU models."""
    models = ("G2", "T4", "P100", "G3", "V100M16", "V100M32")
    # By the GPUs that there are of each.
    odds = np.array([4392, 842, 265, 312, 195, 204], float)
    found = []
    for task in tasks:
        picks = rng.choice(len(models), size=2, replace=False, p=odds / odds.sum())
        named = task.gpus and rng.random() < 1 / 3
        found.append(replace(task, gpu_models=frozenset(models[at] for at in picks)) if named else task)
    return found


def _resampled(tasks: Sequence[Task], rng: np.random.Generator) -> list[Task]:
    """Every class as popular as an exponential draw makes it."""
    odds = {task: float(rng.exponential()) for task in dict.fromkeys(tasks)}
    weights = np.array([odds[task] for task in tasks])
    return [tasks[at] for at in rng.choice(len(tasks), size=len(tasks), p=weights / weights.sum())]


MADE: Mapping[str, Callable[[Sequence[Task], np.random.Generator], list[Task]]] = {
    "cpu-tasks": _more_cpu_tasks,
    "hungry": _hungry,
    "multi-gpu": _more_gpus,
    "shifted": _shifted,
    "picky": _picky,
    "resampled": _resampled,
}
"""How the other lists are made from the published one."""
