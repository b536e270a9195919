"""What manifests and placement know of a deployment. Nothing of either is imported before it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait_deploy.placement.demands import Demand


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

    def demand(self, *, per_node: int = 0) -> Demand:
        """Return what is placed, at most `per_node` replicas on a node (0: any): where their number follows the load,
        the most. Raises `TaskError` for what Ray refuses."""
        from plait_deploy.placement.demands import Demand, task_of

        task = task_of(self.name, num_cpus=self.num_cpus, num_gpus=self.num_gpus, per_node=per_node)
        return Demand(name=self.name, task=task, replicas=self.max_replicas)
