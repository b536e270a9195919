"""Reads Alibaba's trace of disaggregated recommendation (cluster-trace-gpu-v2025, disaggregated_DLRM_trace.csv).

A row is an instance of an app's CN half (many cores, no GPU) or HN half (few cores, one GPU), with the times in seconds
from the trace's start at which it was asked for and deleted; empty is before the start, or after the end. Not read:
when it was scheduled there (that is what a policy decides here), and memory, disk and shares of NICs (the trace has no
nodes, and "GPU-Disaggregated Serving for Deep Learning Recommendation Models at Scale", NSDI 2025, tells cores, GPUs
and NICs of its nodes, but neither memory nor disk).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from plait_deploy.placement.errors import PlacementError, TraceError
from plait_deploy.placement.trace import csv_rows
from plait_deploy.placement.values import WHOLE, Stay, Task

FILE = "disaggregated_DLRM_trace.csv"
_COLUMNS = (
    "instance_sn", "role", "app_name", "cpu_request", "gpu_request", "max_instance_per_node", "creation_time",
    "scheduled_time", "deletion_time",
)  # fmt: skip
CN, HN = "CN", "HN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An instance of one half of an app. Its task's group is the app's half, whose instances a node may run so many of
    (`max_instance_per_node`)."""

    app: str
    role: str
    stay: Stay


def read_instances(path: Path) -> list[Instance]:
    """Read the trace in its order. Raises `TraceError` naming the file, and the line where there is one to name.

    It must add up: no instance twice, a CN without and an HN with a GPU, times that do not go back, and both halves of
    every app.
    """
    found: list[Instance] = []
    named: set[str] = set()
    for number, row in csv_rows(path, _COLUMNS):
        if row["instance_sn"] in named:
            raise TraceError(f"{path}, line {number}: instance {row['instance_sn']} is there twice")
        named.add(row["instance_sn"])
        try:
            found.append(_instance(row))
        except (ValueError, PlacementError) as error:
            raise TraceError(f"{path}, line {number}: not an instance ({error})") from error
    _check_halves(path, found)
    return found


def _instance(row: dict[str, str]) -> Instance:
    app, role = row["app_name"], row["role"]
    if not app or role not in (CN, HN):
        raise TraceError(f"an app and the role CN or HN, not {app!r} and {role!r}")
    cores, gpus, limit = float(row["cpu_request"]), int(row["gpu_request"]), int(row["max_instance_per_node"])
    if not 0 < cores < inf or gpus != (role == HN):
        raise TraceError(f"a CN asks for cores and an HN for cores and 1 GPU, not for {cores:g} and {gpus}")
    if limit < 1 and limit != -1:
        raise TraceError(f"max_instance_per_node is -1 for none, or 1 or more, not {limit}")
    asked, scheduled = _time(row["creation_time"], 0.0), _time(row["scheduled_time"], 0.0)
    deleted = _time(row["deletion_time"], inf)
    if not 0 <= asked <= scheduled <= deleted:
        raise TraceError(f"created at {asked:g} s, scheduled at {scheduled:g} s, deleted at {deleted:g} s")
    task = Task(
        cpu_milli=round(cores * WHOLE), gpus=gpus, gpu_milli=gpus * WHOLE, group=f"{app}/{role}", per_node=max(0, limit)
    )
    return Instance(app=app, role=role, stay=Stay(task=task, arrives_s=asked, leaves_s=deleted))


def _time(text: str, empty: float) -> float:
    return float(text) if text else empty


def _check_halves(path: Path, instances: Sequence[Instance]) -> None:
    halves = {(each.app, each.role) for each in instances}
    for app, role in sorted(halves):
        if (app, HN if role == CN else CN) not in halves:
            raise TraceError(f"{path}: {app} has instances of {role} only; every app has both halves")
