"""What the HTTP side counts.

Seconds and bytes, ``_total`` for counters. Labels have few values: routes are templates, and no label ever holds a
prompt, a request id or a LoRA's name.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Scope

from plait_serving.diffusion.errors import Cancelled, EngineError, Refused
from plait_serving.diffusion.values import Timings

# 0.1 s is a toy picture, 300 s a large one on a busy CPU.
BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
STAGES = ("queue", "lora", "encode", "denoise", "decode")


class HttpMetrics:
    """The HTTP side's metrics in a registry of their own, so that several apps can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "plait_requests", "Answers by route and outcome.", ["route", "outcome"], registry=self.registry
        )
        self.duration = Histogram(
            "plait_request_duration_seconds",
            "From the first byte of a request to the last of its answer.",
            ["route"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.stage = Histogram(
            "plait_stage_seconds", "Where a finished picture's time went.", ["stage"], buckets=BUCKETS_S,
            registry=self.registry,
        )  # fmt: skip
        self.images = Counter("plait_images", "Pictures delivered.", registry=self.registry)
        self.rejected = Counter("plait_rejected", "Requests refused.", ["reason"], registry=self.registry)
        self.cancelled = Counter("plait_cancelled", "Requests whose client went away.", registry=self.registry)
        self.in_flight = Gauge("plait_requests_in_flight", "Picture requests being served.", registry=self.registry)

    def observe_answer(self, scope: Scope, status: int, seconds: float) -> None:
        """One answer was sent (or none: status 499)."""
        route = getattr(scope.get("route"), "path", "other")
        self.requests.labels(route=route, outcome=outcome(status)).inc()
        self.duration.labels(route=route).observe(seconds)

    def observe_pictures(self, count: int, timings: Timings) -> None:
        """``count`` pictures were made."""
        self.images.inc(count)
        for stage in STAGES:
            self.stage.labels(stage=stage).observe(getattr(timings, f"{stage}_s"))

    def observe_failure(self, error: BaseException) -> None:
        """A picture request ended without pictures."""
        if isinstance(error, Cancelled):
            self.cancelled.inc()
        elif isinstance(error, Refused) or (isinstance(error, EngineError) and error.code == "engine_stopped"):
            self.rejected.labels(reason=error.code).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


def outcome(status: int) -> str:
    """ok | bad_request | refused | cancelled | failed."""
    if status == 499:
        return "cancelled"
    if status in (429, 503, 504):
        return "refused"
    if status >= 500:
        return "failed"
    return "bad_request" if status >= 400 else "ok"
