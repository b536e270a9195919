"""Ray's nodes as a cluster that replicas are placed on, and the names of deployments that stand for a model on nodes of
one class."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait_deploy.errors import PlacementError
from plait_deploy.on_ray.replica_location import node_number
from plait_deploy.placement.values import WHOLE, ClusterNode

_AT = "@"
LABEL = "plait-class"
"""The label of Ray's nodes whose value is their class: `ray start --labels plait-class=l40s`."""
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
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


def name_at(name: str, node_class: str) -> str:
    """Return the deployment of `name` on nodes of a class: `engine@l40s`."""
    return f"{name}{_AT}{node_class}"


def split_name(deployment: str) -> tuple[str, str] | None:
    """Return name and class of a deployment that `name_at` named, None for any other."""
    name, at, node_class = deployment.rpartition(_AT)
    return (name, node_class) if at and name and node_class else None


def check_names(names: tuple[str, ...], classes: tuple[str, ...]) -> None:
    """Raise `PlacementError` for names that could not be told apart, and where there is no class."""
    if not classes:
        raise PlacementError("there is no class of nodes; name at least one")
    for each in (*names, *classes):
        if _AT in each or not each:
            raise PlacementError(f"{each!r} names no deployment and no class of nodes: {_AT} parts the two")
    for each in classes:
        if not _LABEL_VALUE.fullmatch(each):
            raise PlacementError(
                f"class {each} cannot be a label's value in Ray: up to 63 letters, digits, '-', '_' and '.', "
                "the first and the last a letter or digit"
            )
