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

_QUEUED_S = 10.0
"""The compute-seconds that wait at a replica when it counts as used up: what a user waits for an image on a CPU."""

_MAX = 2.0
"""A backlog shows how long the overload has lasted, not how many replicas are missing."""


def engine_pressure(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> float:
    """Return the pressure, 0 idle to 1 used up and at most twice that: the compute thread's share of the time, or what
    waits, whichever is more: while a model is loaded nothing may compute. The mappings hold `compute_s`, which counts
    up, and `queued_s`."""
    busy = max(0.0, after["compute_s"] - before["compute_s"]) / seconds
    return min(_MAX, max(busy, after["queued_s"] / _QUEUED_S))


def busy_share(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> float:
    """Return the pressure of a ControlNet service, 0 to 1: its compute thread's share of the time. The mappings hold
    `busy_s`, which counts up.

    What waits says nothing more: an engine asks one replica at a time and sends the next step when it has the answer.
    """
    return max(0.0, after["busy_s"] - before["busy_s"]) / seconds


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
