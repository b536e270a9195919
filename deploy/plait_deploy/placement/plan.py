"""Plans the replicas of a configuration: where each goes, and what is stranded before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait_deploy.errors import PlacementError
from plait_deploy.placement.device_tables import FragmentTables
from plait_deploy.placement.policies.scored import Policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, Demand, Task, TaskPlacement, demand_classes


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """One replica and its place; `at` is None if the cluster is too full for it."""

    demand: Demand
    replica: int
    at: TaskPlacement | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A cluster's GPUs at one moment: all, idle, and stranded, in GPUs; `stranded_by_node`: (N,).

    Stranded is the idle GPU that the average GPU replica of the configuration could not use (FGD's F over the classes
    with GPUs).
    """

    gpus: int
    idle: float
    stranded: float
    stranded_by_node: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """All replicas in the order of the configuration, and the cluster before and after."""

    assigned: tuple[Assigned, ...]
    before: Use
    after: Use

    @property
    def unplaced(self) -> tuple[Assigned, ...]:
        """Replicas for which the cluster is too full."""
        return tuple(each for each in self.assigned if each.at is None)


def plan(state: ClusterState, demands: Sequence[Demand], policy: Policy) -> PlacementPlan:
    """Place all replicas, those with the most GPU first, as Serve does with what is pending. Changes the state.

    Raises `PlacementError` before anything is placed if a replica fits no node, even an empty one, or if there is
    nothing to place.
    """
    if not any(each.replicas for each in demands):
        raise PlacementError("the configuration asks for no replica")
    empty = ClusterState(state.nodes)
    for each in demands:
        if empty.first_fit(each.task) is None:
            raise PlacementError(
                f"{each.name}: a replica needs {said(each.task)}, and no node has that even when it is empty"
            )
    before = use_of(state, demands)
    replicas = [(each, replica) for each in demands for replica in range(each.replicas)]
    places: dict[tuple[str, int], TaskPlacement | None] = {}
    for each, replica in sorted(replicas, key=lambda it: (-it[0].task.total_milli, -it[0].task.cpu_milli)):
        at = policy.choose(state, each.task)
        places[each.name, replica] = at
        if at is not None:
            state.place(each.task, at)
    assigned = tuple(
        Assigned(demand=each, replica=replica, at=places[each.name, replica]) for each, replica in replicas
    )
    return PlacementPlan(assigned=assigned, before=before, after=use_of(state, demands))


def use_of(state: ClusterState, demands: Sequence[Demand]) -> Use:
    """Return what is idle and what is stranded now."""
    idle = float(state.gpu_free.sum()) / WHOLE
    classes = [each for each in demand_classes(demands) if each.task.gpus]
    stranded = np.zeros(len(state.nodes))
    if classes:
        tables = FragmentTables(classes, state)
        stranded = tables.fragments(state) / (tables.weight * WHOLE)
    return Use(
        gpus=int(state.gpus.sum()),
        idle=idle,
        stranded=float(stranded.sum()),
        stranded_by_node=tuple(stranded.tolist()),
    )


def said(task: Task) -> str:
    """Return a task for people: `2 CPUs, 0.5 GPU`."""
    parts = [f"{task.cpu_milli / WHOLE:g} CPU{'' if task.cpu_milli == WHOLE else 's'}"]
    if task.gpus:
        parts.append(f"{task.total_milli / WHOLE:g} GPU{'s' if task.gpus > 1 else ''}")
    return ", ".join(parts)
