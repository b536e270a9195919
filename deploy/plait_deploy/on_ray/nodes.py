"""Ray's nodes as a cluster that replicas are placed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait_deploy.on_ray.names import LABEL
from plait_deploy.on_ray.replica_location import node_number
from plait_deploy.placement.values import WHOLE, ClusterNode

_GPU_MODEL = "ray.io/accelerator-type"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A living node: `node_class` is the value of its label (empty: it has none), `number` what replicas report of
    it."""

    number: float
    node_class: str
    node: ClusterNode


def ray_nodes() -> Sequence[Mapping[str, Any]]:
    """Return Ray's own description of its nodes, the dead ones included."""
    import ray

    found: Sequence[Mapping[str, Any]] = ray.nodes()
    return found


def living_nodes(described: Sequence[Mapping[str, Any]]) -> tuple[RayNode, ...]:
    """Return the living nodes of `ray_nodes`, by class and id."""
    found = [
        RayNode(number=node_number(each["NodeID"]), node_class=each.get("Labels", {}).get(LABEL, ""), node=_node(each))
        for each in described
        if each["Alive"]
    ]
    return tuple(sorted(found, key=lambda it: (it.node_class, it.node.name)))


def _node(each: Mapping[str, Any]) -> ClusterNode:
    has = each.get("Resources", {})
    return ClusterNode(
        name=each["NodeID"],
        cpu_milli=round(has.get("CPU", 0) * WHOLE),
        memory_mib=int(has.get("memory", 0)) >> 20,
        gpus=int(has.get("GPU", 0)),
        gpu_model=each.get("Labels", {}).get(_GPU_MODEL, ""),
    )
