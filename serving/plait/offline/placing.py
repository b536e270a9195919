"""`plait deploy place`: the replicas of a plait.yaml on a cluster, described or running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.config import PlaitConfig
from plait.deployments import deployments
from plait.errors import PlaitError, read, told
from plait.gpu_shares import running_cluster, with_gpus
from plait_deploy.errors import PlacementError
from plait_deploy.placement.cluster_file import parse_cluster
from plait_deploy.placement.plan import PlacementPlan, Use, plan, said
from plait_deploy.placement.policies import OURS, make_policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Demand, demand_classes
from plait_loadtest import strict_yaml

COMPARED = ("ray-pack", "ray-spread")
"""What Ray Serve would do by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A plan, the cluster after it, and how other policies would have ended: their use of it, and what found no
    place."""

    policy: str
    state: ClusterState
    plan: PlacementPlan
    others: Mapping[str, tuple[Use, int]]


def place(config: PlaitConfig, cluster: ClusterState, *, policy: str = OURS, per_node: int = 0) -> Placed:
    """Plan the replicas of a configuration on a cluster, `described` or `running`, at most `per_node` of a deployment
    on a node (0: any). Raises `PlaitError`."""
    with told(PlacementError):
        demands = [row.demand(per_node=per_node) for row in deployments(fitted(config, cluster))]
        state = deepcopy(cluster)
        found = _planned(demands, state, policy)
        others = {name: _planned(demands, deepcopy(cluster), name) for name in COMPARED if name != policy}
    uses = {name: (it.after, len(it.unplaced)) for name, it in others.items()}
    return Placed(policy=policy, state=state, plan=found, others=uses)


def fitted(config: PlaitConfig, cluster: ClusterState) -> PlaitConfig:
    """Return the configuration with `num_gpus` as on this cluster; as it is if not all fits: the plan shows that."""
    with suppress(PlaitError):
        return with_gpus(config, deepcopy(cluster))
    return config


def described(cluster: Path) -> ClusterState:
    """Return the cluster that a file describes. Raises `PlaitError`."""
    return _read(cluster)[0]


def running(address: str) -> ClusterState:
    """Return the living nodes of a running Ray, as if they were empty. Raises `PlaitError`."""
    from plait.server.attach import attached

    with attached(address, 0):
        found = running_cluster()
    if found is None:
        raise PlaitError(f"the Ray at {address} has no living node")
    return found


def _planned(demands: Sequence[Demand], state: ClusterState, policy: str) -> PlacementPlan:
    return plan(state, demands, make_policy(policy, demand_classes(demands)))


def _read(cluster: Path) -> tuple[ClusterState, tuple[str, ...]]:
    """Return the cluster that a file describes, and the names of its groups."""
    with told(strict_yaml.NotYaml):
        data = strict_yaml.parse(read(cluster), str(cluster))[1]
    with told(PlacementError, about=cluster):
        return parse_cluster(data), tuple(group["name"] for group in data["nodes"])


def read_classes(cluster: Path, demands: Sequence[Demand]) -> tuple[str, ...]:
    """Return the classes of nodes in a cluster's file: its groups. Raises `PlaitError` if the file cannot be read,
    `PlacementError` if it makes no sense or the replicas do not fit."""
    state, groups = _read(cluster)
    found = _planned(demands, state, OURS)
    if found.unplaced:
        first = found.unplaced[0].demand
        raise PlacementError(
            f"the cluster is too full for {len(found.unplaced)} of {len(found.assigned)} replicas, the first of "
            f"{first.name} ({said(first.task)} each)"
        )
    return groups


def rows_of(placed: Placed) -> list[tuple[str, ...]]:
    """Return the table of a plan: one line for each deployment and node, the heading first."""
    devices: dict[tuple[Demand, ClusterNode | None], list[str]] = {}
    for each in placed.plan.assigned:
        node = None if each.at is None else placed.state.nodes[each.at.node]
        taken = () if each.at is None else each.at.devices
        devices.setdefault((each.demand, node), []).append("+".join(map(str, taken)))
    rows = [("deployment", "node", "GPU model", "replicas", "CPUs each", "GPUs each", "devices")]
    for (demand, node), of in devices.items():
        where = ("no room", "") if node is None else (node.name, node.gpu_model)
        needs = f"{demand.task.cpu_milli / WHOLE:g}", f"{demand.task.total_milli / WHOLE:g}"
        rows.append((demand.name, *where, str(len(of)), *needs, " ".join(filter(None, of))))
    return [*rows]


def uses_of(placed: Placed) -> list[tuple[str, ...]]:
    """Return the table of the cluster's GPUs before and after, and after Ray's own ways; the heading first."""
    made, rows = placed.plan, [("GPUs", "in use", "idle", "stranded", "replicas without a place")]
    ends = [("before", made.before, ""), (f"after, {placed.policy}", made.after, str(len(made.unplaced)))]
    ends += [(f"after, {name}", use, str(missing)) for name, (use, missing) in placed.others.items()]
    for label, use, missing in ends:
        rows.append((label, f"{use.gpus - use.idle:.2f}", f"{use.idle:.2f}", f"{use.stranded:.2f}", missing))
    return [*rows]


def document_of(placed: Placed) -> dict[str, Any]:
    """Return the plan as plain data. GPUs are in units of one."""
    nodes, state, after = placed.state.nodes, placed.state, placed.plan.after
    return {
        "policy": placed.policy,
        "before": _use(placed.plan.before),
        "after": _use(after),
        "compared": {name: {**_use(use), "unplaced": missing} for name, (use, missing) in placed.others.items()},
        "unplaced": len(placed.plan.unplaced),
        "replicas": [
            {
                "deployment": each.demand.name,
                "replica": each.replica,
                "node": None if each.at is None else nodes[each.at.node].name,
                "devices": [] if each.at is None else list(each.at.devices),
                "num_cpus": each.demand.task.cpu_milli / WHOLE,
                "num_gpus": each.demand.task.total_milli / WHOLE,
            }
            for each in placed.plan.assigned
        ],
        "nodes": [
            {
                "name": node.name,
                "gpu_model": node.gpu_model,
                "idle_cpus": int(state.cpu[at]) / WHOLE,
                "idle_gpus": [int(free) / WHOLE for free in state.devices[at, : node.gpus]],
                "stranded_gpus": round(after.stranded_by_node[at], 6),
            }
            for at, node in enumerate(nodes)
        ],
    }


def _use(use: Use) -> dict[str, Any]:
    found = asdict(use)
    del found["stranded_by_node"]
    return {name: round(value, 6) for name, value in found.items()}
