"""The effect of a configuration change on running deployments: new knobs, more replicas, or a restart.

Serve restarts the replicas of a deployment whose *version* changed or that needs other resources; other options are
passed to running replicas, and a changed count only starts or stops some
(`DeploymentVersion.requires_actor_restart` in ray/serve/_private/version.py, Ray 2.60). So a version stands for the
arguments that are bound to a deployment. All is read from the application that Serve gets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from pydantic import BaseModel

_COUNTS = ("num_replicas", "autoscaling_config")
_UNBOUND = {"version", "user_configured_option_names"}


class Effect(StrEnum):
    """What happens to a deployment, from the cheapest to the most expensive."""

    RECONFIGURED = "reconfigured"
    SCALED = "scaled"
    RESTARTED = "restarted"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """One deployment as it is bound, as JSON. `fixed`: what only a restart changes; `count`: its number of replicas;
    `knobs`: what running replicas receive."""

    fixed: str
    count: str
    knobs: str


def bound_deployments(application: Any) -> Iterator[Any]:
    """Yield the deployments of a bound application, found as Serve finds them (`build_app`): wherever an argument holds
    one."""
    from ray import serve
    from ray.dag.py_obj_scanner import _PyObjScanner

    waiting, seen = [application], set[int]()
    while waiting:
        if id(found := waiting.pop()) in seen:
            continue
        seen.add(id(found))
        deployment = found._bound_deployment
        yield deployment
        scanner = _PyObjScanner(source_type=serve.Application)
        try:
            waiting += scanner.find_nodes((deployment.init_args, deployment.init_kwargs))
        finally:
            scanner.clear()


def surge_percents(application: Any) -> dict[str, int]:
    """Return how many new replicas of a deployment start before old ones stop, in percent of its number, by name."""
    return {it.name: it._deployment_config.max_surge_percent for it in bound_deployments(application)}


def plans(application: Any) -> dict[str, DeploymentPlan]:
    """Return the plans of all deployments of a bound application by name."""
    return {deployment.name: _plan(deployment) for deployment in bound_deployments(application)}


def pin(application: Any, *, salt: str) -> None:
    """Set Serve's version of each deployment. `salt`: unique per run of a server, so that new code never counts as old.

    Serve removed the public way to set them (`options(version=...)`) but still honours them
    (`ServeControllerClient.deploy_applications`, Ray 2.60). Without one, a deployment restarts in every change.
    """
    for deployment in bound_deployments(application):
        text = f"{salt}\n{deployment.name}\n{_plan(deployment).fixed}"
        deployment._version = hashlib.sha256(text.encode()).hexdigest()[:16]


def effects(before: Any, after: Any) -> dict[str, Effect]:
    """Return the effect of replacing the application `before` by `after`, by deployment; unaffected deployments are
    left out."""
    old, new = plans(before), plans(after)
    found: dict[str, Effect] = {name: Effect.REMOVED for name in old if name not in new}
    for name, plan in new.items():
        if name not in old:
            found[name] = Effect.ADDED
        elif plan.fixed != old[name].fixed:
            found[name] = Effect.RESTARTED
        elif plan.count != old[name].count:
            found[name] = Effect.SCALED
        elif plan.knobs != old[name].knobs:
            found[name] = Effect.RECONFIGURED
    return found


def _plan(deployment: Any) -> DeploymentPlan:
    options = deployment._deployment_config.model_dump(exclude=_UNBOUND)
    count = {name: options.pop(name) for name in _COUNTS}
    bound = (deployment.func_or_class, deployment.init_args, deployment.init_kwargs, deployment.ray_actor_options)
    return DeploymentPlan(fixed=_json(bound), count=_json(count), knobs=_json(options))


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """Return what stands for a bound value, in every process alike."""
    if hasattr(value, "_bound_deployment"):
        return value._bound_deployment.name
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value), {field.name: getattr(value, field.name) for field in fields(value)}]
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return [type(value), vars(value)] if hasattr(value, "__dict__") else repr(value)
