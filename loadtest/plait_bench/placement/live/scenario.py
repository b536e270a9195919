"""What happens to a cluster: deployments, nodes that are lost and added, numbers of replicas that change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from plait_bench.placement.live.cluster import NodeSize
from plait_deploy.on_ray.names import LABEL
from plait_deploy.placement.demands import Demand, task_of

CPUS = 0.05
"""Of a replica; what is scarce here is GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChange:
    """One change. `lost`, `added`: names of nodes; `replicas`: new numbers by deployment."""

    name: str
    lost: str = ""
    added: str = ""
    replicas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterScenario:
    """Nodes by name, which is their class, deployments, and what happens after the start."""

    nodes: Mapping[str, NodeSize]
    demands: tuple[Demand, ...]
    steps: tuple[ClusterChange, ...]


def changed(demands: tuple[Demand, ...], replicas: Mapping[str, int]) -> tuple[Demand, ...]:
    """Return the demands with new numbers of replicas."""
    return tuple(replace(each, replicas=replicas.get(each.name, each.replicas)) for each in demands)


def _nodes(names: str, gpus: int) -> dict[str, NodeSize]:
    return {name: NodeSize(cpus=16, gpus=gpus, labels={LABEL: name}) for name in names}


def _demands(wanted: Mapping[float, tuple[int, ...]]) -> tuple[Demand, ...]:
    """Return deployments by the GPUs of a replica, each with as many replicas as its entry says."""
    return tuple(
        Demand(
            name=f"g{round(1000 * gpus)}-{number}",
            task=task_of("a replica", num_cpus=CPUS, num_gpus=gpus),
            replicas=replicas,
        )
        for gpus, counts in wanted.items()
        for number, replicas in enumerate(counts, 1)
    )


SMALL = ClusterScenario(
    nodes=_nodes("abc", 4),
    demands=_demands({0.3: (2,), 0.4: (2,), 0.5: (2,), 0.6: (1,), 1: (1,), 2: (1,)}),
    steps=(
        ClusterChange(name="more", replicas={"g300-1": 3, "g600-1": 2}),
        ClusterChange(name="lost", lost="b"),
        ClusterChange(name="added", added="b"),
        ClusterChange(name="fewer", replicas={"g400-1": 1, "g500-1": 1}),
        ClusterChange(name="large", replicas={"g2000-1": 3}),
    ),
)
"""3 nodes x 4 GPUs, 6 deployments."""

LARGE = ClusterScenario(
    nodes=_nodes("abcdef", 8),
    demands=_demands(
        {
            0.2: (3, 2, 2), 0.25: (2, 2), 0.3: (3, 2, 2), 0.4: (2, 2, 1), 0.45: (2, 1), 0.5: (2, 2), 0.6: (2, 2, 1),
            0.7: (1, 1), 0.8: (1,), 1: (3, 2), 2: (2,), 4: (2,),
        }
    ),
    steps=(
        ClusterChange(name="more", replicas={"g250-1": 4, "g300-1": 6, "g450-1": 4, "g600-1": 4}),
        ClusterChange(name="lost", lost="c"),
        ClusterChange(name="added", added="c"),
        ClusterChange(name="fewer", replicas={"g200-1": 1, "g300-1": 2, "g450-1": 2, "g500-1": 1, "g600-1": 1}),
        ClusterChange(name="large", replicas={"g4000-1": 5}),
    ),
)  # fmt: skip
"""6 nodes x 8 GPUs, 25 deployments."""
