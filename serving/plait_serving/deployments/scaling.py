"""How Serve scales engines and the workers of ranking models: replicas report pressure, and `scale.decide` decides.

Serve's controller imports this module, so it must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from plait_disagg.queue.scale import ScaleState, Scaling, decide

if TYPE_CHECKING:
    from plait_serving.sections import Replicas

PRESSURE = "pressure"
"""The metric's name on its way from the replicas to the controller."""

_LOOK_BACK_S = 15.0
"""The period over which a replica's reports are averaged. Serve collects them every ten seconds unless its
environment sets another interval (`RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S`)."""


class ScaleByPressure:
    """A policy for Serve's `AutoscalingConfig`; its arguments are those of `Scaling`."""

    def __init__(self, **scaling: Any) -> None:
        self._scaling = Scaling(**scaling)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas; Serve calls this several times a second with an `AutoscalingContext`."""
        said: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        wanted, state = decide(
            list(said.get(PRESSURE, {}).values()),
            replicas=context.target_num_replicas,
            scaling=self._scaling,
            state=ScaleState(**context.policy_state.get("plait", {})),
            now_s=context.current_time,
        )
        return wanted, {"plait": asdict(state)}


def autoscaling(replicas: Replicas) -> dict[str, Any]:
    """Return Serve's `autoscaling_config` for a variable number of replicas. `decide` applies the delays, not Serve."""
    bounds = {"min_replicas": replicas.min, "max_replicas": replicas.max}
    return {
        **bounds,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "look_back_period_s": _LOOK_BACK_S,
        "policy": {
            "policy_function": f"{__name__}:{ScaleByPressure.__name__}",
            "policy_kwargs": bounds | replicas.model_dump(include={"up_after_s", "down_after_s"}),
        },
    }
