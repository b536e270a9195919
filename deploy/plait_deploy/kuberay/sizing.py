"""How many pods carry the replicas: first fit, the largest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from plait_deploy.errors import DeployError
from plait_deploy.placement.demands import Reservation
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode


def pods_for(
    reservations: Sequence[Reservation],
    *,
    cpus: int,
    gpus: int = 0,
    memory_bytes: int = 0,
    at_most: bool,
    key: str = "deploy.cpu",
) -> int:
    """Return the number of pods of that size that carry all replicas: as many as there are at most, or at least.

    Raises DeployError if a replica fits no pod; `key` names what to change.
    """
    replicas = list(_replicas(reservations, at_most=at_most))
    pod = ClusterNode(name=key, cpu_milli=cpus * WHOLE, memory_mib=memory_bytes >> 20, gpus=gpus)
    state, needed = ClusterState([pod] * max(1, len(replicas))), 0
    for one in replicas:
        if one.memory_bytes > memory_bytes:
            wants, has = f"{one.memory_bytes / 1e9:g} GB of tables", f"{memory_bytes / 1e9:.3g} GB"
            raise DeployError(f"a replica of {one.name} holds {wants}, and a pod of {key} has {has}: it fits no node")
        task = replace(one.demand().task, memory_mib=one.memory_bytes >> 20)
        if (at := state.first_fit(task)) is None:
            wants = f"{one.num_cpus:g} cores" + (f" and {one.num_gpus:g} GPUs" if one.num_gpus else "")
            has = f"{cpus}" + (f" and {gpus}" if one.num_gpus else "")
            raise DeployError(f"a replica of {one.name} wants {wants}, and a pod of {key} has {has}: it fits no node")
        state.place(task, at)
        needed = max(needed, at.node + 1)
    return needed


def _replicas(reservations: Sequence[Reservation], *, at_most: bool) -> Iterable[Reservation]:
    for one in sorted(reservations, key=lambda it: (it.num_gpus, it.num_cpus, it.name), reverse=True):
        for _ in range(one.max_replicas if at_most else one.min_replicas):
            yield one
