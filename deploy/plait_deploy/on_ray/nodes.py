"""Ray's nodes as a cluster that replicas are placed on, where replicas say they are, and the names of deployments that
stand for a model on nodes of one class.

Replicas report numbers only to Serve's controller, since Serve carries nothing else: a node is known by the first 13
hexadecimal digits of its id (52 bits, exact in a float), devices by a bit each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait_deploy.errors import PlacementError
from plait_deploy.placement.values import WHOLE, ClusterNode

_AT = "@"
LABEL = "plait-class"
"""The label of Ray's nodes whose value is their class: `ray start --labels plait-class=l40s`."""
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_GPU_MODEL = "ray.io/accelerator-type"
NODE, DEVICES, CPUS, GPUS = "plait_node", "plait_devices", "plait_cpus", "plait_gpus"
"""Names of the values among a replica's autoscaling statistics."""
_DIGITS = 13


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


def whereabouts() -> dict[str, float]:
    """Return the node of this actor, what it reserves there, and the devices that Ray gave it, by number."""
    import ray

    context = ray.get_runtime_context()
    reserved = context.get_assigned_resources()
    found = {
        NODE: node_number(context.get_node_id()),
        CPUS: float(reserved.get("CPU", 0.0)),
        GPUS: float(reserved.get("GPU", 0.0)),
    }
    devices = [str(each) for each in context.get_accelerator_ids().get("GPU", [])]
    if all(each.isdecimal() and int(each) < _DIGITS * 4 for each in devices):  # else they are named, not numbered
        found[DEVICES] = float(sum(1 << int(each) for each in devices))
    return found


def node_number(node_id: str) -> float:
    """Return the number that stands for a node of Ray."""
    return float(int(node_id[:_DIGITS], 16))


def devices_in(said: Mapping[str, float]) -> tuple[int, ...] | None:
    """Return the devices that a replica reported; None if they have no numbers."""
    if DEVICES not in said:
        return None
    bits = int(said[DEVICES])
    return tuple(device for device in range(bits.bit_length()) if bits >> device & 1)


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
