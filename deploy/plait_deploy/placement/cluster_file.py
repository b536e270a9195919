"""The description of a cluster, as a person writes it: groups of equal nodes, what already runs on them, and totals.

    nodes:
      - {name: gpu, count: 4, cpus: 64, memory_gib: 256, gpus: 8, gpu_model: L40S}
      - {name: cpu, count: 2, cpus: 96, memory_gib: 512}
    totals: {nodes: 6, cpus: 448, gpus: 32}      # optional; refused if the groups do not add up to them

A group's `used` (`{cpus, memory_gib, gpus: [0.5, 1]}`, by device) is what other programs hold on each of its nodes.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plait_deploy.errors import ClusterError
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Task, TaskPlacement

MAX_NODES = 20_000
"""What decisions are tested with."""

_Amount = Annotated[float, Field(ge=0, le=1e9, strict=True)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Used(_Part):
    cpus: _Amount = 0
    memory_gib: _Amount = 0
    gpus: tuple[Annotated[float, Field(ge=0, le=1, strict=True)], ...] = ()


class _Group(_Part):
    name: str = Field(min_length=1)
    count: int = Field(default=1, ge=1, le=MAX_NODES, strict=True)
    cpus: _Amount
    memory_gib: _Amount
    gpus: int = Field(default=0, ge=0, le=64, strict=True)
    gpu_model: str = ""
    used: _Used = _Used()

    @model_validator(mode="after")
    def _adds_up(self) -> _Group:
        if self.gpu_model and not self.gpus:
            raise ValueError(f"gpu_model {self.gpu_model}, but no gpus")
        if self.used.cpus > self.cpus or self.used.memory_gib > self.memory_gib:
            raise ValueError("used: more than a node has")
        if len(self.used.gpus) > self.gpus:
            raise ValueError(f"used.gpus: {len(self.used.gpus)} devices of {self.gpus}")
        return self

    def nodes(self) -> list[ClusterNode]:
        """Return the nodes; several are numbered."""
        names = [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(1, self.count + 1)]
        cpu, memory = round(self.cpus * WHOLE), int(self.memory_gib * 1024)
        return [
            ClusterNode(name=name, cpu_milli=cpu, memory_mib=memory, gpus=self.gpus, gpu_model=self.gpu_model)
            for name in names
        ]


class _Cluster(_Part):
    nodes: tuple[_Group, ...] = Field(min_length=1)
    totals: dict[Literal["nodes", "cpus", "memory_gib", "gpus"], _Amount] | None = None


def parse_cluster(data: object) -> ClusterState:
    """Return the cluster that the plain data of a file describes. Raises `ClusterError`."""
    try:
        cluster = _Cluster.model_validate(data)
    except ValidationError as error:
        raise ClusterError(_sentence(error)) from error
    nodes, held = list[ClusterNode](), list[_Used]()
    for group in cluster.nodes:
        nodes += group.nodes()
        held += [group.used] * group.count
        if len(nodes) > MAX_NODES:
            raise ClusterError(f"more than {MAX_NODES} nodes")
    ((name, count),) = Counter(node.name for node in nodes).most_common(1)
    if count > 1:
        raise ClusterError(f"two nodes are named {name}")
    sums = {
        "nodes": float(len(nodes)),
        "cpus": sum(group.count * group.cpus for group in cluster.nodes),
        "memory_gib": sum(group.count * group.memory_gib for group in cluster.nodes),
        "gpus": float(sum(node.gpus for node in nodes)),
    }
    for key, said in (cluster.totals or {}).items():
        if abs(said - sums[key]) > 1e-6 * max(1.0, sums[key]):
            raise ClusterError(f"totals.{key} is {said:g}, but the nodes add up to {sums[key]:g}")
    state = ClusterState(nodes)
    for at, used in enumerate(held):
        if used != _Used():
            _hold(state, at, used)
    return state


def _hold(state: ClusterState, at: int, used: _Used) -> None:
    """Take what other programs hold on a node."""
    own = Task(cpu_milli=round(used.cpus * WHOLE), memory_mib=int(used.memory_gib * 1024))
    state.place(own, TaskPlacement(node=at, devices=()))
    for device, share in enumerate(used.gpus):
        if milli := round(share * WHOLE):
            state.place(Task(cpu_milli=0, gpus=1, gpu_milli=milli), TaskPlacement(node=at, devices=(device,)))


def _sentence(error: ValidationError) -> str:
    """Return the first thing that is wrong, with the name of its field."""
    first = error.errors(include_url=False)[0]
    where, message = ".".join(map(str, first["loc"])) or "the cluster", first["msg"].removeprefix("Value error, ")
    message = re.sub("^(Input|Tuple) should", "must", re.sub(r" or instance of \w+", "", message))
    message = message.replace("valid tuple", "list").replace("dictionary", "mapping")
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    given = "" if first["type"] in ("missing", "value_error", "too_short") else f", not {repr(first['input'])[:60]}"
    return f"{where}: {message[0].lower()}{message[1:]}{given}"
