"""The description of a cluster, as a person writes it: groups of equal nodes, what already runs on them, and totals.

    nodes:
      - {name: gpu, count: 4, cpus: 64, memory_gib: 256, gpus: 8, gpu_model: L40S}
      - {name: cpu, count: 2, cpus: 96, memory_gib: 512}
    totals: {nodes: 6, cpus: 448, gpus: 32}      # optional; refused if the groups do not add up to them

A group's `used` (`{cpus, memory_gib, gpus: [0.5, 1]}`, by device) is what other programs hold on each of its nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from plait_deploy.errors import ClusterError
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Task, TaskPlacement

_GROUP = ("name", "count", "cpus", "memory_gib", "gpus", "gpu_model", "used")
_USED = ("cpus", "memory_gib", "gpus")
_TOTALS = ("nodes", "cpus", "memory_gib", "gpus")
MAX_NODES = 20_000
"""What decisions are tested with."""


def parse_cluster(data: object) -> ClusterState:
    """Return the cluster that the plain data of a file describes. Raises `ClusterError`."""
    top = _mapping(data, "the cluster", ("nodes", "totals"))
    groups = top.get("nodes")
    if not isinstance(groups, Sequence) or isinstance(groups, str) or not groups:
        raise ClusterError("nodes: a list of at least one group of nodes")
    nodes: list[ClusterNode] = []
    held: list[Mapping[str, Any]] = []
    for number, group in enumerate(groups):
        made, used = _group(group, f"nodes[{number}]")
        nodes += made
        held += [used] * len(made)
        if len(nodes) > MAX_NODES:
            raise ClusterError(f"more than {MAX_NODES} nodes")
    ((name, count),) = Counter(node.name for node in nodes).most_common(1)
    if count > 1:
        raise ClusterError(f"two nodes are named {name}")
    _check_totals(top.get("totals"), nodes)
    state = ClusterState(nodes)
    for at, used in enumerate(held):
        _hold(state, at, used)
    return state


def _group(data: object, where: str) -> tuple[list[ClusterNode], Mapping[str, Any]]:
    group = _mapping(data, where, _GROUP)
    name = group.get("name")
    if not isinstance(name, str) or not name:
        raise ClusterError(f"{where}.name: a word")
    where = f"nodes of group {name}"
    count, gpus = _whole(group, "count", where, 1), _whole(group, "gpus", where, 0)
    model = group.get("gpu_model", "")
    if not isinstance(model, str):
        raise ClusterError(f"{where}: gpu_model is a word")
    if model and not gpus:
        raise ClusterError(f"{where}: gpu_model {model}, but no gpus")
    if not 1 <= count <= MAX_NODES:
        raise ClusterError(f"{where}: count is 1 to {MAX_NODES}, not {count}")
    if gpus > 64:
        raise ClusterError(f"{where}: {gpus} gpus in one node; 64 at most")
    cpu, memory = _amount(group, "cpus", where, WHOLE), _amount(group, "memory_gib", where, 1024)
    for key in ("cpus", "memory_gib"):
        if key not in group:
            raise ClusterError(f"{where}: {key} is missing")
    names = [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]
    made = [ClusterNode(name=each, cpu_milli=cpu, memory_mib=memory, gpus=gpus, gpu_model=model) for each in names]
    return made, _mapping(group.get("used", {}), f"{where}: used", _USED)


def _hold(state: ClusterState, at: int, used: Mapping[str, Any]) -> None:
    """Take what other programs hold on a node."""
    if not used:
        return
    node = state.nodes[at]
    where = f"node {node.name}: used"
    cpu, memory = _amount(used, "cpus", where, WHOLE), _amount(used, "memory_gib", where, 1024)
    if cpu > node.cpu_milli or memory > node.memory_mib:
        raise ClusterError(f"{where}: more than the node has")
    shares = used.get("gpus", [])
    if not isinstance(shares, Sequence) or isinstance(shares, str):
        raise ClusterError(f"{where}.gpus: a list with the part of each device, such as [0.5, 1]")
    if len(shares) > node.gpus:
        raise ClusterError(f"{where}.gpus: {len(shares)} devices of {node.gpus}")
    state.place(Task(cpu_milli=cpu, memory_mib=memory), TaskPlacement(node=at, devices=()))
    for device, share in enumerate(shares):
        milli = round(_number(share, f"{where}.gpus[{device}]") * WHOLE)
        if milli > WHOLE:
            raise ClusterError(f"{where}.gpus[{device}]: {share} of one GPU")
        if milli:
            state.place(Task(cpu_milli=0, gpus=1, gpu_milli=milli), TaskPlacement(node=at, devices=(device,)))


def _check_totals(data: object, nodes: Sequence[ClusterNode]) -> None:
    """Compare the sums of the groups with what the file says they are."""
    if data is None:
        return
    totals = _mapping(data, "totals", _TOTALS)
    sums = {
        "nodes": float(len(nodes)),
        "cpus": sum(node.cpu_milli for node in nodes) / WHOLE,
        "memory_gib": sum(node.memory_mib for node in nodes) / 1024,
        "gpus": float(sum(node.gpus for node in nodes)),
    }
    for key, said in totals.items():
        if abs(_number(said, f"totals.{key}") - sums[key]) > 1e-6 * max(1.0, sums[key]):
            raise ClusterError(f"totals.{key} is {said}, but the nodes add up to {sums[key]:g}")


def _mapping(data: object, where: str, keys: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where}: a mapping with the keys {', '.join(keys)}")
    if unknown := [str(key) for key in data if key not in keys]:
        raise ClusterError(f"{where}: unknown key {unknown[0]}; there are {', '.join(keys)}")
    return data


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
        raise ClusterError(f"{where}: a number from 0 on, not {value!r}")
    return float(value)


def _amount(data: Mapping[str, Any], key: str, where: str, unit: int) -> int:
    return int(_number(data.get(key, 0), f"{where}: {key}") * unit)


def _whole(data: Mapping[str, Any], key: str, where: str, default: int) -> int:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ClusterError(f"{where}: {key} is a whole number, not {value!r}")
    return value
