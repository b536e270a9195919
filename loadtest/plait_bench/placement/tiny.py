"""A Serve application whose replicas do nothing but hold their resources and say where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from plait_deploy.on_ray.nodes import whereabouts


class Tiny:
    """A replica."""

    async def whereabouts(self) -> dict[str, float]:
        """Return where it is."""
        return whereabouts()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return where it is; Serve calls this for the policy."""
        return whereabouts()


class Root:
    """The application's entry; nobody calls it."""

    def __init__(self, *handles: Any) -> None:
        self._handles = handles


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application with the deployments that `args` names."""
    tiny = [
        serve.deployment(Tiny).options(name=name, health_check_period_s=2.0, graceful_shutdown_timeout_s=1.0).bind()
        for name in args["deployments"]
    ]
    root = serve.deployment(Root).options(name="root", ray_actor_options={"num_cpus": 0})
    return root.bind(*tiny)
