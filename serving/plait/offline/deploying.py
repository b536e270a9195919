"""`plait deploy`: what a plait.yaml means for a cluster. The Serve application, where nothing or a policy places it
(`render`), and its replicas on nodes, described or running (`place`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plait.config import PlaitConfig, TuningSection
from plait.deployments import Deployment, deployments
from plait.errors import ConfigError, PlaitError, read, told
from plait.gpu_shares import pods_with_gpus, running_cluster, with_gpus
from plait.server.environment import RAY_ENVIRONMENT, attached
from plait_deploy.errors import PlacementError
from plait_deploy.placement.cluster_file import parse_cluster
from plait_deploy.placement.plan import PlacementPlan, Use, plan, said
from plait_deploy.placement.policies import OURS, make_policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Demand, demand_classes
from plait_loadtest import strict_yaml
from plait_serving.deployments import INGRESS
from plait_serving.diffusion.knobs import Placement

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


def kuberay_manifests(config: PlaitConfig) -> str:
    """Return the YAML of all objects. Raises `ConfigError` for what contradicts itself or fits no pod."""
    from plait_deploy.errors import DeployError
    from plait_deploy.kuberay.render import render_kuberay
    from plait_serving.deployments.proxy import proxy_environment

    # In a pod the server listens on all interfaces, whatever it does on this machine.
    config = config.model_copy(update={"server": config.server.behind("0.0.0.0")})  # noqa: S104
    config = with_gpus(config, pods_with_gpus(config))
    with told(DeployError, to=lambda text: ConfigError("the manifests", [text])):
        return render_kuberay(
            serve_application(config),
            deployments(config),
            config.deploy,
            port=config.server.port,
            has_keys=bool(config.server.api_keys),
            longest_request_s=config.server.drain_s,
            ray_version=version("ray"),
            environment={**RAY_ENVIRONMENT, **proxy_environment(config.server.answered_hosts)},
        )


def serve_application(config: PlaitConfig) -> dict[str, Any]:
    """Return the application as Serve's config file has it: sections as arguments, knobs with their deployments."""
    args = {"server": config.server.model_dump(mode="json", exclude_defaults=True), **_shapes(config)}
    if config.tuning != TuningSection():
        args["tuning"] = config.tuning.model_dump(mode="json", exclude_defaults=True)
    ingress, *rows = deployments(config)
    return {
        "name": "plait",
        "route_prefix": "/",
        "import_path": "plait.app:build",
        "args": args,
        "deployments": [{"name": row.name, **_options(row)} for row in (*rows, ingress)],
    }


def placed_application(config: PlaitConfig, cluster: Path) -> dict[str, Any]:
    """Return the application as Serve's config file has it, placed on the classes of nodes that a file describes: its
    groups. Raises `PlaitError` for what does not fit there.

    The number of replicas of what is placed stands with its deployments only, where a change restarts nothing.
    """
    from plait_deploy.on_ray.nodes import name_at
    from plait_deploy.on_ray.policy import placed_deployments, policy_options
    from plait_serving.deployments.scaling import autoscaling

    state, classes = _read(cluster)
    config = fitted(config, state)
    ingress, *rows = deployments(config)
    policies = {row.name: autoscaling(row.scaling)["policy"] for row in rows if row.scaling is not None}
    with told(PlacementError, about=cluster):
        demands = [row.demand() for row in rows]
        found = _planned(demands, state, OURS)
        if found.unplaced:
            first = found.unplaced[0].demand
            raise PlacementError(
                f"the cluster is too full for {len(found.unplaced)} of {len(found.assigned)} replicas, the first of "
                f"{first.name} ({said(first.task)} each)"
            )
        placed = placed_deployments(demands, classes)
        policy = policy_options(demands, classes, follows=policies)
    at = {name_at(row.name, of): row for row in rows for of in classes}
    options = [{"name": name, **placed[name], **_options(row)} for name, row in at.items()]
    plain = serve_application(config)
    return {
        **plain,
        "args": {**plain["args"], **_uncounted(_shapes(config)), "node_classes": list(classes)},
        "deployments": [*options, {"name": ingress.name, **_options(ingress)}],
        "autoscaling_policy": policy,
    }


def _options(row: Deployment) -> dict[str, Any]:
    """Return what a Serve configuration sets of a deployment: what may change while it runs."""
    surge = {"max_surge_percent": row.options["max_surge_percent"]}
    return surge if row.name == INGRESS else {**surge, "user_config": dict(row.knobs or {})}


def _uncounted(data: Any) -> Any:
    """Return sections without the numbers of replicas."""
    if not isinstance(data, Mapping):
        return data
    return {key: _uncounted(value) for key, value in data.items() if not (key == "replicas" and isinstance(value, int))}


def _shapes(config: PlaitConfig) -> dict[str, Any]:
    """Return the sections without their knobs, which belong to the deployments, where a change is a reconfigure.

    The knob `controlnet_placement` stays if it is local, since it also decides which deployments exist.
    """
    images, recommend = config.images, config.recommend
    shapes: dict[str, Any] = {"images": None, "recommend": None}
    if images is not None:
        shapes["images"] = images.model_dump(mode="json", exclude_defaults=True, exclude={"knobs"})
        if images.knobs.controlnet_placement is Placement.LOCAL:  # this knob also decides which deployments there are
            shapes["images"]["knobs"] = {"controlnet_placement": Placement.LOCAL.value}
    if recommend is not None:
        own = {"models": {"__all__": {part: {"knobs"} for part in ("cn", "hn", "whole")}}}
        shapes["recommend"] = recommend.model_dump(mode="json", exclude_defaults=True, exclude=own)
    return shapes


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
    for field in strict_yaml.not_text(data):
        raise PlaitError(f"{cluster}: {field}: not valid Unicode")
    with told(PlacementError, about=cluster):
        return parse_cluster(data), tuple(group["name"] for group in data["nodes"])


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
