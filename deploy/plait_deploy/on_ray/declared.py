"""What a Serve configuration says for an application whose deployments are placed.

The number of replicas that a model shall have is the upper bound of each of its deployments (`max_replicas`): that may
change without a restart, while the arguments of the application and of its policy may not (Serve derives the code's
version from them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait_deploy.on_ray.nodes import LABEL, check_names, name_at
from plait_deploy.on_ray.policy import PlacementPolicy
from plait_deploy.placement.demands import Demand
from plait_deploy.placement.policies import OURS
from plait_deploy.placement.values import WHOLE

_POLICY = f"{PlacementPolicy.__module__}:{PlacementPolicy.__name__}"


def placed_options(demand: Demand, node_class: str) -> dict[str, Any]:
    """Return Serve's options for one deployment: no replicas until the policy says so, on nodes of the class only."""
    return {
        "autoscaling_config": {
            "min_replicas": 0,
            "max_replicas": demand.replicas,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "downscale_to_zero_delay_s": 0.0,
        },
        "ray_actor_options": {**_needs(demand), "label_selector": {LABEL: node_class}},
    }


def _needs(demand: Demand) -> dict[str, float]:
    return {"num_cpus": demand.task.cpu_milli / WHOLE, "num_gpus": demand.task.total_milli / WHOLE}


def placed_deployments(demands: Sequence[Demand], classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of all deployments by name. Raises `PlacementError`."""
    check_names(tuple(each.name for each in demands), tuple(classes))
    return {
        name_at(each.name, node_class): placed_options(each, node_class) for each in demands for node_class in classes
    }


def policy_options(
    demands: Sequence[Demand],
    classes: Sequence[str],
    *,
    follows: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the `autoscaling_policy` of the application. `follows`: the policies, as in an `autoscaling_config`, of
    those whose number of replicas follows the load."""
    return {
        "policy_function": _POLICY,
        "policy_kwargs": {
            "classes": list(classes),
            "deployments": {each.name: _needs(each) for each in demands},
            "policy": OURS,
            **({"follows": {name: dict(each) for name, each in follows.items()}} if follows else {}),
        },
    }
