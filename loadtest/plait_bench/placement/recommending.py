"""Recommendation on the public trace: split into CN and HN halves, or monolithic, placed by each policy.

What the arrangements are, on which nodes and how many: `plait_deploy/placement/arrangements.py`; what stranded is:
`recorded.py` there. A round is a seed: the order of the nodes, and of instances that arrive together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload
from plait_bench.errors import BenchError, SystemUnavailable
from plait_deploy.placement.arrangements import NodePool, monolithic, placeable, split, trace_end_s
from plait_deploy.placement.dlrm_trace import FILE, Instance, read_instances
from plait_deploy.placement.errors import PlacementError
from plait_deploy.placement.policies import OURS, POLICIES, make_policy
from plait_deploy.placement.recorded import RecordedReplay, replay
from plait_deploy.placement.simulator import SEEDS, shuffled
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, classes_of

FOLDER = "dlrm-v2025"
LOOKS = 31
"""Looks at the cluster: one on each of the 31 days."""
ARRANGEMENTS: Mapping[str, Callable[[Sequence[Instance]], tuple[NodePool, ...]]] = {
    "split": split,
    "monolithic": partial(monolithic, shared=False),
    "monolithic-shared": partial(monolithic, shared=True),
}


class Recommending(Workload):
    """The trace's instances at their times; a row for each arrangement."""

    systems = POLICIES
    ours = OURS
    rounds: ClassVar[Mapping[str, int]] = dict.fromkeys(POLICIES, 2)
    metrics: Mapping[str, Metric] = {
        "nodes": Metric(unit="nodes"),
        "gpus": Metric(unit="GPUs"),
        "gpus_used": Metric(unit="GPUs"),
        "cores_stranded": Metric(unit="cores", better="lower"),
        "cores_stranded_pct": Metric(unit="% of cores", better="lower"),
        "gpus_stranded": Metric(unit="GPUs", better="lower"),
        "gpus_stranded_pct": Metric(unit="% of GPUs", better="lower"),
        "refused_pct": Metric(unit="% of instances", better="lower"),
        "covered_pct": Metric(unit="% of instances"),
        "decision_p99_ms": Metric(unit="ms", better="lower"),
    }
    pools: Mapping[str, tuple[NodePool, ...]]
    end_s: float
    covered: float

    def __init__(self, name: str, data: Path | None) -> None:
        self.name, self._data = name, data

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Read the trace and make the arrangements. Raises `SystemUnavailable` without it, `BenchError` if it does not
        add up."""
        if self._data is None or not (self._data / FOLDER).is_dir():
            raise SystemUnavailable(f"{self.name} needs a folder {FOLDER} with the public trace in --data")
        try:
            every = read_instances(self._data / FOLDER / FILE)
            instances = placeable(every)
            self.end_s, self.covered = trace_end_s(instances), len(instances) / len(every)
            self.pools = {name: arranged(instances) for name, arranged in ARRANGEMENTS.items()}
        except PlacementError as error:
            raise BenchError(f"{self.name}: {error}") from error
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make the subject of a policy; every round gets a fresh policy and cluster."""
        yield _Placing(self, system)

    def readings(self, arrangement: str, system: str, seed: int) -> list[Reading]:
        """Replay all pools of an arrangement and summarise them."""
        pools = self.pools[arrangement]
        runs = [self._replay(pool, system, seed) for pool in pools]
        nodes = [node for pool in pools for node in pool.nodes]
        cores, gpus = sum(node.cpu_milli for node in nodes) / WHOLE, sum(node.gpus for node in nodes)
        lost_cores = sum(run.stranded.cpu_milli for run in runs) / WHOLE
        lost_gpus = sum(run.stranded.gpu_milli for run in runs) / WHOLE
        modelled = {
            "nodes": len(nodes),
            "gpus": gpus,
            "gpus_used": sum(run.gpu_used for run in runs) / WHOLE,
            "cores_stranded": lost_cores,
            "cores_stranded_pct": 100 * lost_cores / cores,
            "gpus_stranded": lost_gpus,
            "gpus_stranded_pct": 100 * lost_gpus / max(1, gpus),
            "refused_pct": 100 * sum(run.refused for run in runs) / sum(len(pool.stays) for pool in pools),
            "covered_pct": 100 * self.covered,
        }
        p99_ms = 1e3 * float(np.quantile(np.concatenate([run.decisions_s for run in runs]), 0.99))
        where = f"{self.name}-{arrangement}"
        return [
            *(Reading(metric=key, value=value, workload=where, kind="modelled") for key, value in modelled.items()),
            Reading(metric="decision_p99_ms", value=p99_ms, workload=where),
        ]

    def _replay(self, pool: NodePool, system: str, seed: int) -> RecordedReplay:
        state = ClusterState(shuffled(pool.nodes, seed))
        policy = make_policy(system, classes_of(stay.task for stay in pool.stays), seed=seed)
        return replay(state, pool.stays, policy, seed=seed, looks=LOOKS, end_s=self.end_s)


class _Placing:
    """Implements `Subject`."""

    def __init__(self, workload: Recommending, system: str) -> None:
        self._workload, self._system = workload, system

    def warm_up(self) -> None:
        """Do nothing: times of decisions are quantiles of thousands."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Run the policy on all arrangements with the seed of round `number`."""
        return [
            reading
            for arrangement in ARRANGEMENTS
            for reading in self._workload.readings(arrangement, self._system, SEEDS[0] + number - 1)
        ]
