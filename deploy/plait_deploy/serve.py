"""A Ray Serve config file (as accepted by `serve deploy` and KubeRay's `serveConfigV2`) from plain data.

The knobs, which may change on running replicas, go into each deployment's `user_config`, so that editing them and
deploying again reconfigures instead of restarting; everything else goes into the application's `args`. The
`autoscaling_policy` of an application sets the numbers of replicas of what is placed (`plait_deploy.on_ray`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import yaml
from pydantic import ValidationError


def render_serve(
    application: Mapping[str, Any], *, host: str, port: int, proxies: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
) -> str:
    """Return the YAML for one application, which is as Ray's schema has it, checked against that. Raises ValueError if
    Ray would refuse it."""
    document = {
        "proxy_location": proxies,
        "http_options": {"host": host, "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [dict(application)],
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
