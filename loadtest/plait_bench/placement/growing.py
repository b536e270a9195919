"""How the time of a decision grows with the number of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import numpy as np

from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload
from plait_bench.placement.lists import Trace
from plait_deploy.placement.policies import OURS, make_policy
from plait_deploy.placement.simulator import SEEDS
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import ClusterNode, TaskClass, classes_of

SIZES = (1_250, 5_000, 20_000)
DECISIONS = 3_000
"""Of each size, after as many that fill caches: a server's first minutes are not its rule."""


class Growing(Workload):
    """Decisions on the published cluster, repeated up to each size; a row for each size."""

    systems = (OURS, "fgd", "first-fit")
    ours = OURS
    rounds: ClassVar[Mapping[str, int]] = dict.fromkeys(systems, 3)
    metrics: Mapping[str, Metric] = {
        "decision_us": Metric(unit="us", better="lower"),
        "decision_p99_ms": Metric(unit="ms", better="lower"),
        "growth": Metric(unit="of linear", better="lower"),
    }
    trace: Trace
    classes: tuple[TaskClass, ...]

    def __init__(self, name: str, read: Callable[[], Trace]) -> None:
        self.name, self._read = name, read

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Load the list. Raises `SystemUnavailable` without its data."""
        self.trace = self._read()
        self.classes = classes_of(self.trace.tasks)
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make the subject of a policy."""
        yield _Deciding(self, system)

    def decisions_s(self, system: str, size: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Time `DECISIONS` decisions on a cluster of that many nodes, as full as the tasks make it."""
        from plait_deploy.placement.simulator import fill

        rng = np.random.default_rng(seed)
        state = ClusterState(_repeated(self.trace.nodes, size))
        policy = make_policy(system, self.classes, seed=seed)
        tasks = [self.trace.tasks[at] for at in rng.integers(len(self.trace.tasks), size=2 * DECISIONS)]
        return fill(state, tasks, policy, self.classes).decisions_s[DECISIONS:]


def _repeated(nodes: Sequence[ClusterNode], size: int) -> list[ClusterNode]:
    return [
        replace(nodes[number % len(nodes)], name=f"{nodes[number % len(nodes)].name}-{number}")
        for number in range(size)
    ]


class _Deciding:
    """Implements `Subject`."""

    def __init__(self, workload: Growing, system: str) -> None:
        self._workload, self._system = workload, system

    def warm_up(self) -> None:
        """Do nothing: every size has decisions that do not count."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Time decisions at each size; `growth`: the time from the first size to the last, per node."""
        found: list[Reading] = []
        means = []
        for size in SIZES:
            took_s = self._workload.decisions_s(self._system, size, SEEDS[0] + number - 1)
            means.append(float(took_s.mean()))
            where = f"{self._workload.name}-{size}"
            found += [
                Reading(metric="decision_us", value=1e6 * means[-1], workload=where),
                Reading(metric="decision_p99_ms", value=1e3 * float(np.quantile(took_s, 0.99)), workload=where),
            ]
        growth = means[-1] / means[0] / (SIZES[-1] / SIZES[0])
        return [*found, Reading(metric="growth", value=growth)]
