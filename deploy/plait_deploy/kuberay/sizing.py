"""How many pods carry the replicas: first fit, the largest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plait_deploy.errors import DeployError

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A Serve deployment: what one replica reserves in cores and GPUs, and how many there are, at least and at most.
    `is_shard`: it holds part of a model's tables, at most `memory_bytes` of them (0: not known). `workload`: whose
    health it is part of; the ingress is of both."""

    name: str
    num_cpus: float
    num_gpus: float = 0.0
    min_replicas: int = 1
    max_replicas: int = 1
    is_shard: bool = False
    memory_bytes: int = 0
    workload: str | None = None


@dataclass(slots=True)
class _Pod:
    cpus: float
    memory_bytes: int
    gpus: list[float] = field(default_factory=list)

    def takes(self, one: Reservation) -> bool:
        """Reserve for a replica if it fits. Ray gives whole GPUs, or a fraction of a single one."""
        if one.num_cpus > self.cpus + _ROUNDING or one.memory_bytes > self.memory_bytes:
            return False
        wanted = [1.0] * int(one.num_gpus) if one.num_gpus >= 1 else [one.num_gpus] if one.num_gpus else []
        fitting = sorted((free, i) for i, free in enumerate(self.gpus) if wanted and free + _ROUNDING >= wanted[0])
        if len(fitting) < len(wanted):
            return False
        for share, (_, i) in zip(wanted, fitting, strict=False):
            self.gpus[i] -= share
        self.cpus -= one.num_cpus
        self.memory_bytes -= one.memory_bytes
        return True


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
    pods: list[_Pod] = []
    for one in _replicas(reservations, at_most=at_most):
        if any(pod.takes(one) for pod in pods):
            continue
        pods.append(_Pod(cpus=float(cpus), memory_bytes=memory_bytes, gpus=[1.0] * gpus))
        if one.memory_bytes > memory_bytes:
            wants, has = f"{one.memory_bytes / 1e9:g} GB of tables", f"{memory_bytes / 1e9:.3g} GB"
            raise DeployError(f"a replica of {one.name} holds {wants}, and a pod of {key} has {has}: it fits no node")
        if not pods[-1].takes(one):
            wants = f"{one.num_cpus:g} cores" + (f" and {one.num_gpus:g} GPUs" if one.num_gpus else "")
            has = f"{cpus}" + (f" and {gpus}" if one.num_gpus else "")
            raise DeployError(f"a replica of {one.name} wants {wants}, and a pod of {key} has {has}: it fits no node")
    return len(pods)


def _replicas(reservations: Sequence[Reservation], *, at_most: bool) -> Iterable[Reservation]:
    for one in sorted(reservations, key=lambda it: (it.num_gpus, it.num_cpus, it.name), reverse=True):
        for _ in range(one.max_replicas if at_most else one.min_replicas):
            yield one
