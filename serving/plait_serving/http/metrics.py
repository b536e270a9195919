"""`GET /metrics` in Prometheus' text format."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from starlette.responses import PlainTextResponse, Response

from plait_disagg.errors import RankError
from plait_serving.diffusion.errors import EngineError
from plait_serving.http.context import ContextDep, RouteContext
from plait_serving.http.edge.auth import Principal, Role, principal
from plait_serving.http.edge.repeating import PACED_PATHS
from plait_serving.replica_metrics import ReplicaMetrics, exposition, family, tenant_families, this_process

router = APIRouter(tags=["operations"])

T = TypeVar("T")

WAIT_S = 0.85
"""Whatever is down, a scrape is answered within a second."""
_UP = "Whether the service's own metrics are in this answer; 0: it did not answer in time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What all replicas count, each series with its replica's name, what they count of tenants, and whether each
    service answered."""

    families: Sequence[Metric]
    of_tenants: Sequence[Metric]
    is_up: dict[str, bool]


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(context: ContextDep, who: Annotated[Principal, Depends(principal)]) -> Response:
    """Return the HTTP side's metrics, of all ingress replicas, and those of the services and their workers. What each
    tenant used is for admins."""
    found = await gather(context)
    shown = [*found.families, *(found.of_tenants if who.role is Role.ADMIN else ())]
    return Response(exposition(shown), headers={"content-type": CONTENT_TYPE_LATEST})


async def gather(context: RouteContext) -> Gathered:
    """Ask all replicas what they count, and keep what they say of tenants."""
    images, ranking = context.images, context.ranking
    own, others, of_images, of_workers, catalog = await asyncio.gather(
        own_metrics(context),
        _in_time(None if context.neighbours is None else context.neighbours()),
        _in_time(None if images is None else images.counts()),
        _in_time(None if ranking is None else ranking.worker_counts()),
        _in_time(None if images is None else images.catalog()),
    )
    is_up = {"ranking": of_workers is not None, "images": of_images is not None}
    is_up = {name: up for name, up in is_up.items() if name in context.workloads}
    context.metrics.expect(PACED_PATHS, [card.name for card in catalog.models] if catalog else ())
    up = family("plait_service_up", _UP, {(name,): int(up) for name, up in is_up.items()}, "service")
    own = replace(own, families=[*own.families, up])
    answers = [own, *(of_images or ()), *(of_workers or ()), *(others or ())]
    for each in answers:
        context.account.learn(each.account)
    families = [it for each in answers for it in each.labelled()]
    return Gathered(families=families, of_tenants=tenant_families(answers), is_up=is_up)


async def own_metrics(context: RouteContext) -> ReplicaMetrics:
    """Return what this process itself counts: of HTTP, and of the ranking requests that it sent."""
    ranking, me = None if context.ranking is None else await _in_time(context.ranking.metric_families()), this_process()
    nodes = () if context.nodes is None else await context.nodes()
    families = [*context.metrics.families(), *(ranking or ()), *nodes]
    used = {(me, *key): value for key, value in context.metrics.used.items()}
    return ReplicaMetrics(replica=me, families=families, account={**context.account.sums, **used})


async def _in_time(asked: Awaitable[T] | None) -> T | None:
    """Return the answer, or None if there is none in time: the others' are worth more than waiting."""
    if asked is None:
        return None
    try:
        return await asyncio.wait_for(asked, WAIT_S)
    except (TimeoutError, EngineError, RankError):
        return None
