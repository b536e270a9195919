"""Reads lists of nodes and tasks in the format of Alibaba's `openb` trace (cluster-trace-gpu-v2023)."""

from __future__ import annotations

import csv
from pathlib import Path

from plait_deploy.placement.errors import PlacementError, TraceError
from plait_deploy.placement.values import ClusterNode, Task

_NODES = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_TASKS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec")


def read_nodes(path: Path) -> list[ClusterNode]:
    """Read a list of nodes. Raises `TraceError` naming the file, and the line where there is one to name."""
    nodes = []
    for number, row in csv_rows(path, _NODES):
        try:
            nodes.append(
                ClusterNode(
                    name=row["sn"], cpu_milli=int(row["cpu_milli"]), memory_mib=int(row["memory_mib"]),
                    gpus=int(row["gpu"]), gpu_model=row["model"],
                )
            )  # fmt: skip
        except (ValueError, PlacementError) as error:
            raise TraceError(f"{path}, line {number}: not a node ({error})") from error
    return nodes


def read_tasks(path: Path) -> list[Task]:
    """Read a list of tasks, sorted by name. `gpu_spec` names models, separated by `|`. Raises `TraceError`."""
    tasks = []
    for number, row in csv_rows(path, _TASKS):
        try:
            gpus, models = int(row["num_gpu"]), frozenset(filter(None, row["gpu_spec"].split("|")))
            task = Task(
                cpu_milli=int(row["cpu_milli"]), memory_mib=int(row["memory_mib"]), gpus=gpus,
                gpu_milli=int(row["gpu_milli"]) if gpus else 0, gpu_models=models,
            )  # fmt: skip
            tasks.append((row["name"], task))
        except (ValueError, PlacementError) as error:
            raise TraceError(f"{path}, line {number}: not a task ({error})") from error
    return [task for _, task in sorted(tasks, key=lambda named: named[0])]


def csv_rows(path: Path, columns: tuple[str, ...]) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a CSV with their line numbers. Raises `TraceError` if a column is missing, or all rows are."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines, restval="")
            if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                raise TraceError(f"{path} lacks the column {missing[0]}; it needs {', '.join(columns)}")
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise TraceError(f"{path} has no rows")
    return rows
