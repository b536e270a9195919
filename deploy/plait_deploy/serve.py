"""A Ray Serve config file (as accepted by `serve deploy` and KubeRay's `serveConfigV2`) from plain data.

The knobs, which may change on running replicas, go into each deployment's `user_config`, so that editing them and
deploying again reconfigures instead of restarting; everything else goes into the application's `args`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeApplication:
    """One application: how to build it, with which arguments, and what is set for its deployments by name: knobs, what
    a replica's actor asks Ray for (which replaces what the code says), and `max_surge_percent` (`surges`). `placed`:
    further options of deployments whose numbers of replicas `autoscaling_policy` sets (`plait_deploy.on_ray`)."""

    name: str
    import_path: str
    args: Mapping[str, Any]
    knobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    actors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    placed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    surges: Mapping[str, int] = field(default_factory=dict)
    autoscaling_policy: Mapping[str, Any] | None = None
    route_prefix: str = "/"


def render_serve(
    application: ServeApplication, *, host: str, port: int, proxies: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
) -> str:
    """Return the YAML, checked against Ray's own schema. Raises ValueError if Ray would refuse it."""
    names = {**application.actors, **application.placed, **application.knobs, **application.surges}
    policy = application.autoscaling_policy
    document = {
        "proxy_location": proxies,
        "http_options": {"host": host, "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": application.name,
                "route_prefix": application.route_prefix,
                "import_path": application.import_path,
                "args": dict(application.args),
                **({} if policy is None else {"autoscaling_policy": dict(policy)}),
                "deployments": [_deployment(application, name) for name in names],
            }
        ],
    }
    _check(document)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _deployment(application: ServeApplication, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, **application.placed.get(name, {})}
    if (actor := application.actors.get(name)) is not None:
        found["ray_actor_options"] = dict(actor)
    if (surge := application.surges.get(name)) is not None:
        found["max_surge_percent"] = surge
    if (knobs := application.knobs.get(name)) is not None:
        found["user_config"] = dict(knobs)
    return found


def _check(document: Mapping[str, Any]) -> None:
    """Validate the document with Ray's schema and compare the result with the document: Ray silently ignores unknown
    keys."""
    from ray.serve.schema import ServeDeploySchema

    understood = ServeDeploySchema.model_validate(document).model_dump(mode="json", exclude_unset=True)
    if lost := _missing(document, understood, ""):
        raise ValueError(f"Ray Serve does not know {', '.join(lost)}")


def _missing(wanted: Any, found: Any, path: str) -> list[str]:
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return [path]
        return [
            lost
            for key, value in wanted.items()
            for lost in (
                [f"{path}.{key}".lstrip(".")] if key not in found else _missing(value, found[key], f"{path}.{key}")
            )
        ]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [lost for i, value in enumerate(wanted) for lost in _missing(value, found[i], f"{path}.{i}")]
    return []
