"""A Ray Serve config file (as accepted by `serve deploy` and KubeRay's `serveConfigV2`) from plain data.

The knobs, which may change on running replicas, go into each deployment's `user_config`, so that editing them and
deploying again reconfigures instead of restarting; everything else goes into the application's `args`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from pydantic import ValidationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeApplication:
    """One application: how to build it, with which arguments, and Serve's options of its deployments by name, which
    replace what the code says. `autoscaling_policy` sets the numbers of replicas of those that are placed
    (`plait_deploy.on_ray`)."""

    name: str
    import_path: str
    args: Mapping[str, Any]
    deployments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    autoscaling_policy: Mapping[str, Any] | None = None


def render_serve(
    application: ServeApplication, *, host: str, port: int, proxies: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
) -> str:
    """Return the YAML, checked against Ray's own schema. Raises ValueError if Ray would refuse it."""
    policy = application.autoscaling_policy
    document = {
        "proxy_location": proxies,
        "http_options": {"host": host, "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": application.name,
                "route_prefix": "/",
                "import_path": application.import_path,
                "args": dict(application.args),
                **({} if policy is None else {"autoscaling_policy": dict(policy)}),
                "deployments": [{"name": name, **options} for name, options in application.deployments.items()],
            }
        ],
    }
    _check(document)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _check(document: Mapping[str, Any]) -> None:
    """Validate the document with Ray's schema, which by itself ignores unknown keys."""
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(document, extra="forbid")
    except ValidationError as error:
        unknown = [".".join(map(str, it["loc"])) for it in error.errors() if it["type"] == "extra_forbidden"]
        if unknown:
            raise ValueError(f"Ray Serve does not know {', '.join(unknown)}") from error
        raise
