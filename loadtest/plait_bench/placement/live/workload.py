"""The benchmark's workload on a Ray of several nodes: what is stranded after each step of a scenario."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload
from plait_bench.errors import BenchError
from plait_bench.placement.live.scenario import ClusterScenario
from plait_deploy.placement.policies import OURS

SYSTEMS = (OURS, "ray-spread", "ray-pack")


class OnRay(Workload):
    """A scenario, played by each system on a fresh cluster; a row for each step."""

    systems = SYSTEMS
    ours = OURS
    rounds: ClassVar[Mapping[str, int]] = dict.fromkeys(SYSTEMS, 1)
    metrics: Mapping[str, Metric] = {
        "stranded_pct": Metric(unit="% of GPUs", better="lower"),
        "idle_pct": Metric(unit="% of GPUs"),
        "without_place": Metric(unit="replicas", better="lower"),
        "restarted": Metric(unit="replicas", better="lower"),
        "step_s": Metric(unit="s", better="lower"),
    }

    def __init__(self, name: str, scenario: ClusterScenario) -> None:
        self.name, self.scenario = name, scenario
        self.say: Say = lambda _: None

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Keep where progress goes."""
        self.say = say
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make the subject of a system; every round starts a cluster of its own."""
        yield _PlayedSubject(self, system)


class _PlayedSubject:
    """Implements `Subject`."""

    def __init__(self, workload: OnRay, system: str) -> None:
        self._workload, self._system = workload, system

    def warm_up(self) -> None:
        """Do nothing: nothing is kept between rounds."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Play the scenario. Raises `BenchError` if Ray does not start."""
        from plait_bench.placement.live.cluster import local_nodes
        from plait_bench.placement.live.play import play

        try:
            with local_nodes() as nodes:
                phases = play(self._system, self._workload.scenario, nodes, say=self._workload.say)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            raise BenchError(f"{self._workload.name}: {error}") from error
        return [
            Reading(metric=metric, value=value, workload=f"{self._workload.name}-{phase.name}")
            for phase in phases
            for metric, value in {
                "stranded_pct": 100 * phase.stranded / phase.gpus,
                "idle_pct": 100 * phase.idle / phase.gpus,
                "without_place": float(phase.without),
                "restarted": float(phase.restarted),
                "step_s": phase.seconds,
            }.items()
        ]
