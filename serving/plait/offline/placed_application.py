"""The Serve application of a plait.yaml whose replicas are placed on classes of nodes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.config import CONTROLNET_PREFIX, ENGINE, INGRESS, PlaitConfig, worker_name
from plait.errors import PlaitError
from plait.offline.manifests import reservations, serve_application
from plait.offline.placing import read_classes
from plait_deploy.on_ray.declared import placed_deployments, policy_options
from plait_deploy.on_ray.names import name_at
from plait_deploy.placement.demands import Demand, task_of
from plait_deploy.placement.errors import PlacementError
from plait_deploy.serve import ServeApplication
from plait_serving.deployments.scaling import autoscaling
from plait_serving.sections import Replicas, Replicated


def placed_application(config: PlaitConfig, cluster: Path) -> ServeApplication:
    """Return the application as Serve's config file has it, placed on the classes of nodes that a file describes: its
    groups. Raises `PlaitError` for what does not fit there.

    The number of replicas of what is placed stands with its deployments only, where a change restarts nothing.
    """
    try:
        demands = _demands(config)
        classes = read_classes(cluster, demands)
        placed = placed_deployments(demands, classes)
        policy = policy_options(demands, classes, follows=_policies(config))
    except PlacementError as error:
        raise PlaitError(f"{cluster}: {error}") from error
    places = {each.name: [name_at(each.name, of) for of in classes] for each in demands}
    plain = serve_application(config)
    args = {**plain.args, **_uncounted(plain.args, config), "node_classes": list(classes)}
    knobs = {at: it for name, it in plain.knobs.items() for at in places.get(name, [name])}
    surges = {at: it for name, it in plain.surges.items() for at in places.get(name, [name])}
    return replace(plain, args=args, knobs=knobs, surges=surges, placed=placed, autoscaling_policy=policy)


def _demands(config: PlaitConfig) -> list[Demand]:
    """Return what is placed: all but the ingress. Where the number of replicas follows the load, the max."""
    return [
        Demand(
            name=one.name,
            task=task_of(one.name, num_cpus=one.num_cpus, num_gpus=one.num_gpus),
            replicas=one.max_replicas,
        )
        for one in reservations(config)
        if one.name != INGRESS
    ]


def _policies(config: PlaitConfig) -> dict[str, Any]:
    """Return the policies of the deployments whose number of replicas follows the load, by name."""
    parts: dict[str, Replicated] = {
        worker_name(model, role): part
        for model, section in config.ranking_models.items()
        for role, part in section.parts.items()
    }
    if (images := config.images) is not None:
        parts[ENGINE] = images
        parts |= {CONTROLNET_PREFIX + name: section for name, section in images.controlnet_services().items()}
    return {
        name: autoscaling(part.replicas)["policy"]
        for name, part in parts.items()
        if isinstance(part.replicas, Replicas)
    }


def _uncounted(args: Mapping[str, Any], config: PlaitConfig) -> dict[str, Any]:
    """Return the sections among the arguments without the numbers of replicas."""
    found: dict[str, Any] = {name: copy.deepcopy(args[name]) for name in ("images", "recommend")}
    if (images := found["images"]) is not None:
        for section in (images, *(images.get("controlnets") or {}).values()):
            if isinstance(section.get("replicas"), int):
                del section["replicas"]
    if config.recommend is not None:
        for model in (found["recommend"].get("models") or {}).values():
            for role in ("cn", "hn", "whole"):
                if isinstance(model.get(role, {}).get("replicas"), int):
                    del model[role]["replicas"]
            shards = model.get("cn", {}).get("shards")
            if isinstance(shards, dict) and isinstance(shards.get("replicas"), int):
                del shards["replicas"]
    return found
