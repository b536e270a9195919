"""What every route needs, built once by `app.create_app` and found through the application's state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends
from prometheus_client import Metric
from starlette.requests import Request

from plait_serving.diffusion.errors import Overloaded
from plait_serving.health import Health
from plait_serving.http.desk import Desk
from plait_serving.http.edge.auth import ANYONE, Principal
from plait_serving.http.edge.counters import HttpMetrics
from plait_serving.http.edge.refusals import RecentRefusals
from plait_serving.http.edge.turn_threads import TurnThreads
from plait_serving.images.config import ResultsSection
from plait_serving.images.results import ResultStore
from plait_serving.images.service import ImageService, Preprocessors, random_seed
from plait_serving.replica_metrics import Account, ReplicaMetrics
from plait_serving.sections import ApiKey, TenantLimits

if TYPE_CHECKING:
    from plait_serving.ranking.local import LocalRankingService  # which needs torch


def installed_version() -> str:
    """Return the version of the installed distribution, or "unknown" in a bare checkout."""
    try:
        return version("plait")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The settings of the HTTP side. Without keys every caller is `anyone` (auth.py), without hosts any name is taken
    (hosts.py)."""

    api_keys: tuple[ApiKey, ...] = ()
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    anyone: Principal = ANYONE
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    a1111_api: bool = False
    max_body_bytes: int = 64 * 2**20  # four control images of 12 MB each, in base64
    max_bodies_bytes: int = 512 * 2**20  # a tenant alone may have half of it
    # A parser holds the interpreter: 8 MiB of numbers (10,000 candidates with 100 features each) take it some 60 ms.
    max_infer_json_bytes: int = 8 * 2**20
    results: ResultsSection | None = None
    preprocessors: Preprocessors = field(default_factory=dict)
    # By model: what the numbers and words of its inputs mean, where that is known (`starter/words.py`).
    words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    codec_threads: int = 4
    # A refusal within this time still becomes a proper HTTP status instead of an event in a stream that began with 200.
    first_event_wait_s: float = 1.0
    ping_interval_s: float = 15.0


@dataclass(slots=True, kw_only=True, eq=False)
class RouteContext:
    """The services, the settings and the few impure things that routes use, so that tests can fix them.

    `images` is None on a server that only ranks; an image-only server has no `ranking`. `neighbours` returns what other
    replicas count, of the ingress and of whatever is no engine, where there may be any; `nodes` the gauges of the
    cluster's nodes, given where replicas are.
    `decoder` is for files of clients, so that `workers`, which encode images and read what ranks, do not wait. It is
    one thread: files of the largest kind that is read take a second each, and the engine is to have the other cores.
    """

    images: ImageService | None
    settings: HttpSettings
    ranking: LocalRankingService | None = None
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
    neighbours: Callable[[], Awaitable[Sequence[ReplicaMetrics]]] | None = None
    nodes: Callable[[Sequence[Mapping[str, float]]], Sequence[Metric]] | None = None
    now_s: Callable[[], float] = time.time
    monotonic_s: Callable[[], float] = time.monotonic
    random_seed: Callable[[], int] = random_seed
    results: ResultStore | None = field(init=False)
    decoder: TurnThreads = field(default_factory=partial(TurnThreads, 1, "plait-decode"))
    workers: TurnThreads = field(init=False)
    refusals: RecentRefusals[Overloaded] = field(init=False)
    account: Account = field(default_factory=Account)
    desk: Desk = field(default_factory=Desk)

    def __post_init__(self) -> None:
        self.workers = TurnThreads(self.settings.codec_threads, "plait-work")
        kept = self.settings.results
        self.results = None if kept is None else ResultStore(kept, now_s=self.now_s)
        self.refusals = RecentRefusals(self.monotonic_s)

    @property
    def image_service(self) -> ImageService:
        """The image service, for routes that exist only where there is one."""
        assert self.images is not None
        return self.images

    @property
    def ranking_service(self) -> LocalRankingService:
        """The ranking service, for routes that exist only if there is one."""
        assert self.ranking is not None
        return self.ranking

    @property
    def workloads(self) -> Mapping[str, ImageService | LocalRankingService]:
        """The services that this server has, by the names of their workloads."""
        services = {"images": self.images, "ranking": self.ranking}
        return {name: service for name, service in services.items() if service is not None}

    async def health(self, workload: str | None = None) -> Health:
        """Return the health of one of the `workloads`, or of all: each is asked, whatever the others answer."""
        asked = self.workloads if workload is None else {workload: self.workloads[workload]}
        states = await asyncio.gather(*(service.health() for service in asked.values()))
        reasons = [state.reason or "not ready" for state in states if not state.ready]
        warmup_s = next((state.warmup_s for state in states if state.warmup_s is not None), None)
        return Health(ready=not reasons, reason="; ".join(reasons) or None, warmup_s=warmup_s)


def get_context(request: Request) -> RouteContext:
    """Return the application's context; a FastAPI dependency."""
    context = request.app.state.context
    assert isinstance(context, RouteContext)
    return context


ContextDep = Annotated[RouteContext, Depends(get_context)]
