"""How many replicas each class of nodes runs, when all that can be set is that number.

A scheduler that shall run three of `engine` on nodes of class `a` chooses the node in the class and the device itself
(Ray: `state.devices_taken`). So what stands is kept where it is, what has lost its node or never found a
device is placed again, what is too much is stopped where that strands least, and what is missing starts in waves that
find their devices in whatever order they start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from plait_deploy.errors import TaskError
from plait_deploy.placement.plan import use_of
from plait_deploy.placement.policies.scored import Policy
from plait_deploy.placement.state import ClusterState, devices_taken
from plait_deploy.placement.values import Demand, Task, TaskPlacement

_SHUFFLES = 16
"""Random orders in which a wave is tried, beside the largest first and the smallest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A replica that runs, or that the scheduler shall start, of the deployment `name` on nodes of `node_class`.

    `node`: the index of its node, and `devices` there; None while that is not known.
    """

    name: str
    node_class: str
    node: int | None = None
    devices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recount:
    """Replicas by (deployment, class), those by deployment for which there is no room now (`unplaced`), and those that
    will start when others have (`held_back`)."""

    counts: Mapping[tuple[str, str], int]
    unplaced: Mapping[str, int]
    held_back: int


def recount(
    state: ClusterState, node_classes: Sequence[str], demands: Sequence[Demand], standing: Sequence[Standing],
    policy: Policy,
) -> Recount:  # fmt: skip
    """Return the new numbers. `state` is the empty cluster, which is filled; node i is of class `node_classes[i]`."""
    return _Recounting(state, node_classes, demands, policy).run(standing)


class _Recounting:
    """One run. `_kept` lists the places by (deployment, class), `_starting` the tasks by node."""

    def __init__(
        self, state: ClusterState, node_classes: Sequence[str], demands: Sequence[Demand], policy: Policy
    ) -> None:
        self._state, self._classes, self._policy = state, node_classes, policy
        self._demands = {each.name: each for each in demands}
        self._kept: dict[tuple[str, str], list[TaskPlacement]] = {}
        self._starting: dict[int, list[Task]] = {}
        self._rows: list[list[int]] = []

    def run(self, standing: Sequence[Standing]) -> Recount:
        late = [each for each in standing if each.name in self._demands and not self._keep(each)]
        self._rows = [row.tolist() for row in self._state.devices]
        unsettled: Counter[tuple[str, str]] = Counter()
        for each in sorted(late, key=lambda it: _size(self._demands[it.name].task)):
            if self._start(each):
                unsettled[each.name, each.node_class] += 1
        self._stop_surplus(unsettled)
        starts, unplaced = self._place_missing()
        counts = Counter({key: len(places) for key, places in self._kept.items()})
        held_back = 0
        for node, tasks in starts.items():
            started = self._wave(node, [self._demands[name].task for name in tasks])
            counts.update((name, self._classes[node]) for name in tasks[:started])
            held_back += len(tasks) - started
        return Recount(counts=counts, unplaced=unplaced, held_back=held_back)

    def _keep(self, each: Standing) -> bool:
        """Place a replica where it is known to be; return False if that is not known, or cannot be."""
        task = self._demands[each.name].task
        if each.node is None:
            return False
        at = None if each.devices is None else TaskPlacement(node=each.node, devices=each.devices)
        try:
            self._settle(each, task, at or self._state.best_fit(task, each.node))
        except TaskError:
            return False
        return True

    def _start(self, each: Standing) -> bool:
        """Place a replica that starts where its class has room for it; return False if it has none."""
        task = self._demands[each.name].task
        room = [
            (int(self._state.gpu_free[node]), node)
            for node, node_class in enumerate(self._classes)
            if node_class == each.node_class and each.node in (None, node) and self._fits(task, node)
        ]
        if not room:
            return False
        node = min(room)[1]
        self._settle(each, task, self._state.best_fit(task, node))
        self._starting.setdefault(node, []).append(task)
        return True

    def _settle(self, each: Standing, task: Task, place: TaskPlacement) -> None:
        self._state.place(task, place)
        self._kept.setdefault((each.name, each.node_class), []).append(place)

    def _fits(self, task: Task, node: int) -> bool:
        return bool(self._state.fits(task, np.array([node]), self._state.allows(task))[0])

    def _stop_surplus(self, unsettled: Counter[tuple[str, str]]) -> None:
        """Stop what is too much: first what has not started yet, as the scheduler does, then what frees the most."""
        for name, demand in self._demands.items():
            while sum(len(places) for (of, _), places in self._kept.items() if of == name) > demand.replicas:
                there = [key for key, places in self._kept.items() if key[0] == name and places]
                fresh = [key for key in there if unsettled[key]]
                key = fresh[0] if fresh else min(there, key=lambda it: (self._stranded_without(demand, it), it))
                unsettled[key] -= bool(fresh)
                self._state.release(demand.task, self._kept[key].pop())

    def _stranded_without(self, demand: Demand, key: tuple[str, str]) -> float:
        place = self._kept[key][-1]
        self._state.release(demand.task, place)
        stranded = use_of(self._state, tuple(self._demands.values())).stranded
        self._state.place(demand.task, place)
        return stranded

    def _place_missing(self) -> tuple[dict[int, list[str]], dict[str, int]]:
        """Return the names of what starts, by node, the largest first, and how many of each have no room."""
        have: Counter[str] = Counter()
        for (name, _), places in self._kept.items():
            have[name] += len(places)
        missing = [each for each in self._demands.values() for _ in range(each.replicas - have[each.name])]
        starts: dict[int, list[str]] = {}
        unplaced: Counter[str] = Counter()
        for each in sorted(missing, key=lambda it: _size(it.task)):
            at = self._policy.choose(self._state, each.task)
            if at is None:
                unplaced[each.name] += 1
                continue
            self._state.place(each.task, at)
            starts.setdefault(at.node, []).append(each.name)
        return starts, dict(unplaced)

    def _wave(self, node: int, tasks: Sequence[Task]) -> int:
        """Return how many of the tasks, the largest first, may start now beside those that are starting."""
        starting = self._starting.get(node, [])
        for count in range(len(tasks), 0, -1):
            if _fit_in_any_order(self._rows[node], [*starting, *tasks[:count]]):
                return count
        return 0 if starting else min(1, len(tasks))


def _size(task: Task) -> tuple[int, int]:
    return -task.total_milli, -task.cpu_milli


def _fit_in_any_order(row: Sequence[int], tasks: Sequence[Task]) -> bool:
    """Whether the tasks find devices with `row` milli-GPUs free in every order tried, if Ray chooses the devices."""
    order = sorted((task for task in tasks if task.gpus), key=_size)
    if len({task.total_milli for task in order}) < 2:
        return _fit_in_order(row, order)
    chance = Random(0)
    return (
        _fit_in_order(row, order)
        and _fit_in_order(row, order[::-1])
        and all(_fit_in_order(row, chance.sample(order, len(order))) for _ in range(_SHUFFLES))
    )


def _fit_in_order(row: Sequence[int], tasks: Sequence[Task]) -> bool:
    free = list(row)
    for task in tasks:
        devices = devices_taken(free, task)
        if len(devices) < task.gpus:
            return False
        for device in devices:
            free[device] -= task.gpu_milli
    return True
