"""Clusters that fill up: tasks of 130 % of all GPUs arrive, none departs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean

import numpy as np

from plait_bench.benchmark import Metric, Reading, ResultRow, Say, Subject, Workload
from plait_bench.errors import BenchError
from plait_bench.placement.lists import Trace
from plait_deploy.placement.errors import PlacementError
from plait_deploy.placement.policies import OURS, make_policy
from plait_deploy.placement.simulator import SEEDS, Replay, fill, inflated, shuffled
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import TaskClass, classes_of

METRICS: Mapping[str, Metric] = {
    "allocated_pct": Metric(unit="% of GPUs", better="higher"),
    "stranded_pct": Metric(unit="% of GPUs", better="lower"),
    "fragmented_pct": Metric(unit="% of GPUs", better="lower"),
    "refused_pct": Metric(unit="% of tasks", better="lower"),
    "run_s": Metric(unit="s", better="lower"),
    "decision_p99_ms": Metric(unit="ms", better="lower"),
}


class Simulated(Workload):
    """A list of tasks replayed by each policy. Subclasses say how."""

    metrics = METRICS
    ours = OURS
    trace: Trace
    classes: tuple[TaskClass, ...]

    def __init__(self, name: str, read: Callable[[], Trace], systems: Sequence[str]) -> None:
        self.name, self._read, self.systems = name, read, tuple(systems)
        self._seen: dict[str, list[Replay]] = {}

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Load the list. Raises `SystemUnavailable` without its data."""
        self.trace = self._read()
        self.classes = classes_of(self.trace.tasks)
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make the subject of a policy; every round gets a fresh policy and cluster."""
        yield _Replaying(self, system)

    def replay(self, system: str, seed: int) -> Replay:
        """Run a policy on a cluster with this seed."""
        raise NotImplementedError

    def readings(self, system: str, replay: Replay) -> list[Reading]:
        """Summarise a run."""
        self._seen.setdefault(system, []).append(replay)
        shares = {
            "allocated_pct": replay.allocated,
            "stranded_pct": replay.stranded,
            "fragmented_pct": replay.fragmented,
            "refused_pct": replay.refused / replay.tasks,
        }
        p99_ms = 1e3 * float(np.quantile(replay.decisions_s, 0.99))
        return [
            *(Reading(metric=metric, value=100 * share, kind="modelled") for metric, share in shares.items()),
            Reading(metric="run_s", value=replay.wall_s),
            Reading(metric="decision_p99_ms", value=p99_ms),
        ]

    def conclude(self) -> Sequence[ResultRow]:
        """Give the means over all seeds, which is what was published."""
        return [
            self.mean(system, f"{metric}_mean_pct", [100 * getattr(replay, metric) for replay in seen])
            for system, seen in self._seen.items()
            for metric in ("allocated", "stranded", "fragmented")
        ]

    def mean(self, system: str, metric: str, values: Sequence[float]) -> ResultRow:
        """Make the row of a mean; its spread is the lowest and the highest value."""
        return ResultRow(
            system=system, workload=self.name, metric=metric, unit="% of GPUs", value=fmean(values), p20=min(values),
            p80=max(values), n=len(values), kind="modelled", rounds=tuple(values),
        )  # fmt: skip


class Filling(Simulated):
    """A list at 130 % load. `published`: the published means by policy, if there are any."""

    def __init__(
        self,
        name: str,
        read: Callable[[], Trace],
        systems: Sequence[str],
        *,
        published: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        super().__init__(name, read, systems)
        self._published = published

    def replay(self, system: str, seed: int) -> Replay:
        """Fill a cluster. Raises `BenchError`."""
        state = ClusterState(shuffled(self.trace.nodes, seed))
        try:
            tasks = inflated(self.trace.tasks, state.total_milli, seed)
            return fill(state, tasks, make_policy(system, self.classes, seed=seed), self.classes)
        except PlacementError as error:
            raise BenchError(f"{self.name}: {error}") from error

    def conclude(self) -> Sequence[ResultRow]:
        """Give the published means as well."""
        there = {system: value for system, value in self._published().items() if system in self._seen}
        said = [self.mean(system, "published_mean_pct", [value]) for system, value in there.items()]
        return [*super().conclude(), *said]


class _Replaying:
    """Implements `Subject`."""

    def __init__(self, workload: Simulated, system: str) -> None:
        self._workload, self._system = workload, system

    def warm_up(self) -> None:
        """Do nothing: a run's own start is part of it."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Run the policy with the seed of round `number`; beyond the published seeds they go on."""
        return self._workload.readings(self._system, self._workload.replay(self._system, SEEDS[0] + number - 1))
