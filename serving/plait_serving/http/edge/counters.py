"""The metrics of the HTTP side.

Seconds and bytes, `_total` for counters. Labels have few values: routes are templates, models are those that there
are, and no label ever holds a prompt, a request id or a LoRA's name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Scope

from plait_serving.diffusion.errors import Cancelled, EngineError, Overloaded, Refused
from plait_serving.diffusion.values import Timings

if TYPE_CHECKING:
    from plait_disagg.values import RankAnswer

# 0.1 s is a toy image, 300 s a large one on a busy CPU.
BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
STAGES = ("queue", "lora", "encode", "denoise", "decode")
# Ranking answers within tens of milliseconds, or its caller has gone on without it.
RANK_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0)
RANK_STAGES = ("queued", "lookup", "wire", "dense")

_RANKS = re.compile(r"/v1/recommend|/v2/.+/infer")
"""The routes whose requests are rankings."""
_EXPECTED = (200, 429, 500, 503, 504)
"""How requests that do work end. Prometheus sees a counter's first increment only if it has seen its 0."""


MODEL = "model"
"""Under this key routes put the base model that is asked into a request's state."""


class HttpMetrics:
    """The HTTP side's metrics in their own registry, so that several apps can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        count, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        seconds = partial(Histogram, registry=self.registry, buckets=BUCKETS_S)
        rank_seconds = partial(seconds, buckets=RANK_BUCKETS_S)
        of_answers = ["route", "outcome", "code", "model"]
        self.requests = count("plait_requests", "Answers by how they ended; `model`: of image requests.", of_answers)
        whole = "from the first byte of a request to the last of its answer."
        self.duration = seconds("plait_request_duration_seconds", whole.capitalize(), ["route", "model"])
        self.rank_duration = rank_seconds("plait_rank_request_duration_seconds", f"Rankings, {whole}", ["route"])
        self.stage = seconds("plait_stage_seconds", "Where a finished image's time went.", ["stage"])
        self.images = count("plait_images", "Images delivered.")
        self.rejected = count("plait_rejected", "Requests refused.", ["reason"])
        self.cancelled = count("plait_cancelled", "Requests whose client went away.")
        self.used: defaultdict[tuple[str, str], float] = defaultdict(float)
        """What was counted of tenants, by tenant and name (`replica_metrics`)."""
        self.in_flight = gauge("plait_requests_in_flight", "Image requests being served.")
        gauge("plait_ingress_replicas", "Processes that answer HTTP.").set(1)  # several replicas add up
        in_ranker = "Inside the ranker, from its request to its answer."
        self._in_ranker = rank_seconds("plait_rank_duration_seconds", in_ranker, ["model"])
        self._rank_stage = rank_seconds("plait_rank_stage_seconds", "Where a ranking's time went.", ["model", "stage"])
        self._candidates = count("plait_rank_candidates", "Candidates ranked.", ["model"])
        self._crossed = count("plait_rank_crossed_bytes", "Bytes between the halves.", ["model"])
        # Series are kept, because finding them by their labels costs more than counting.
        self._series, self._rank_series = cache(self._series_of), cache(self._rank_series_of)

    def expect(self, routes: Iterable[str], models: Iterable[str] = ("",)) -> None:
        """Show the counters of these routes, and of these models, before the first request."""
        for route, model, status in product(routes, models, _EXPECTED):
            self._series(route, status, model)

    def observe_answer(self, scope: Scope, status: int, seconds: float) -> None:
        """Record that a request ended (without a response: status 499)."""
        answers, durations = self._series(_route(scope), status, scope["state"].get(MODEL, ""))
        answers.inc()
        durations.observe(seconds)

    def observe_repeated(self, scope: Scope, tenant: str, count: int) -> None:
        """Record that a proxy refused `count` requests for this route, in no time."""
        self._series(_route(scope), 429)[0].inc(count)
        self.observe_refused(tenant, Overloaded.code, count)

    def _series_of(self, route: str, status: int, model: str = "") -> tuple[Counter, Histogram]:
        is_ranking = _RANKS.fullmatch(route) is not None
        durations = self.rank_duration.labels(route) if is_ranking else self.duration.labels(route, model)
        return self.requests.labels(route, outcome(status), status, model), durations

    def observe_images(self, count: int, timings: Timings) -> None:
        """Record that `count` images were made."""
        self.images.inc(count)
        for stage in STAGES:
            self.stage.labels(stage=stage).observe(getattr(timings, f"{stage}_s"))

    def observe_failure(self, error: BaseException) -> None:
        """Record that an image request ended without images."""
        if isinstance(error, Cancelled):
            self.cancelled.inc()
        elif isinstance(error, Refused) or (isinstance(error, EngineError) and error.code == "engine_stopped"):
            self.rejected.labels(reason=error.code).inc()

    def observe_refused(self, tenant: str, reason: str, count: int = 1) -> None:
        """Record that `count` image requests were refused of which no engine hears."""
        self.rejected.labels(reason=reason).inc(count)
        self.used[tenant, "image_requests_rejected"] += count

    def observe_rank(self, model: str, candidates: int, seconds: float, answer: RankAnswer, tenant: str) -> None:
        """Record that `candidates` of a known model were ranked within `seconds`."""
        self.used[tenant, "rankings"] += 1
        self.used[tenant, "candidates"] += candidates
        in_ranker, stages, ranked, crossed = self._rank_series(model)
        in_ranker.observe(seconds)
        for name, series in stages.items():
            if spent_ms := getattr(answer.timings, name):  # a whole model has no wire
                series.observe(spent_ms / 1e3)
        ranked.inc(candidates)
        crossed.inc(answer.bytes_crossed)

    def _rank_series_of(self, model: str) -> tuple[Histogram, Mapping[str, Histogram], Counter, Counter]:
        stages = {f"{stage}_ms": self._rank_stage.labels(model, stage) for stage in RANK_STAGES}
        return self._in_ranker.labels(model), stages, self._candidates.labels(model), self._crossed.labels(model)


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "other")


def outcome(status: int) -> str:
    """Return ok | bad_request | refused | cancelled | failed. Whoever is asked to come back later for want of a worker,
    or gets nothing in time, was failed."""
    if status == 499:
        return "cancelled"
    if status == 429:
        return "refused"
    if status >= 500:
        return "failed"
    return "bad_request" if status >= 400 else "ok"
