"""What a plait.yaml means for a cluster: the Serve application, where nothing or a policy places it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plait.config import PlaitConfig, TuningSection
from plait.deployments import Deployment, deployments
from plait.errors import ConfigError, told
from plait.gpu_shares import pods_with_gpus, with_gpus
from plait_serving.deployments import INGRESS
from plait_serving.diffusion.knobs import Placement


def kuberay_manifests(config: PlaitConfig) -> str:
    """Return the YAML of all objects. Raises `ConfigError` for what contradicts itself or fits no pod."""
    from plait.server.environment import RAY_ENVIRONMENT
    from plait_deploy.errors import DeployError
    from plait_deploy.kuberay.render import render_kuberay
    from plait_serving.deployments.proxy import proxy_environment

    # In a pod the server listens on all interfaces, whatever it does on this machine.
    config = config.model_copy(update={"server": config.server.behind("0.0.0.0")})  # noqa: S104
    config = with_gpus(config, pods_with_gpus(config))
    with told(DeployError, to=lambda said: ConfigError("the manifests", [said])):
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
    from plait.offline.placing import described, fitted, read_classes
    from plait_deploy.errors import PlacementError
    from plait_deploy.on_ray.nodes import name_at
    from plait_deploy.on_ray.policy import placed_deployments, policy_options
    from plait_serving.deployments.scaling import autoscaling

    config = fitted(config, described(cluster))
    ingress, *rows = deployments(config)
    policies = {row.name: autoscaling(row.scaling)["policy"] for row in rows if row.scaling is not None}
    with told(PlacementError, about=cluster):
        demands = [row.demand() for row in rows]
        classes = read_classes(cluster, demands)
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
