"""`GET /metrics` in Prometheus' text format."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from starlette.responses import PlainTextResponse, Response

from plait_disagg.errors import RankError
from plait_serving.diffusion.errors import EngineError
from plait_serving.http.context import ContextDep, RouteContext
from plait_serving.http.edge.auth import Principal, Role, principal
from plait_serving.http.edge.repeating import PACED_PATHS
from plait_serving.replica_metrics import TENANT_PREFIX, ReplicaMetrics, exposition, family, labelled, this_process

router = APIRouter(tags=["operations"])

T = TypeVar("T")

WAIT_S = 0.85
"""Whatever is down, a scrape is answered within a second."""
_MODELS = "plait_model_resident"
_UP = "Whether the service's own metrics are in this answer; 0: it did not answer in time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What all replicas count, each series with its replica's name, and whether each service answered."""

    families: Sequence[Metric]
    is_up: dict[str, bool]


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(context: ContextDep, who: Annotated[Principal, Depends(principal)]) -> Response:
    """Return the HTTP side's metrics, of all ingress replicas, and those of the services and their workers. What each
    tenant used is for admins."""
    families: Iterable[Metric] = (await gather(context)).families
    if who.role is not Role.ADMIN:
        families = (each for each in families if not each.name.startswith(TENANT_PREFIX))
    return Response(exposition(families), headers={"content-type": CONTENT_TYPE_LATEST})


async def gather(context: RouteContext) -> Gathered:
    """Ask all replicas what they count, and keep what they say of tenants."""
    images, ranking = context.images, context.ranking
    own, others, of_images, of_workers = await asyncio.gather(
        own_metrics(context),
        _in_time(None if context.neighbours is None else context.neighbours()),
        _in_time(None if images is None else images.metric_families()),
        _in_time(None if ranking is None else ranking.worker_families()),
    )
    is_up = {name: found is not None for name, found in (("ranking", of_workers), ("images", of_images))}
    is_up = {name: up for name, up in is_up.items() if name in context.workloads}
    models = {it.labels["model"] for each in of_images or () if each.name == _MODELS for it in each.samples}
    context.metrics.expect(PACED_PATHS, models)
    up = family("plait_service_up", _UP, {(name,): int(up) for name, up in is_up.items()}, "service")
    here = labelled(own.replica, [*own.families, *(of_images or ()), *(of_workers or ()), up])
    there = [it for each in others or () for it in labelled(each.replica, each.families)]
    for each in others or ():
        context.account.learn(each.account)
    context.account.read([*here, *there])
    return Gathered(families=[*here, *there], is_up=is_up)


async def own_metrics(context: RouteContext) -> ReplicaMetrics:
    """Return what this process itself counts: of HTTP, and of the ranking requests that it sent."""
    ranking = None if context.ranking is None else await _in_time(context.ranking.metric_families())
    nodes = () if context.nodes is None else await context.nodes()
    families = [*context.metrics.families(), *(ranking or ()), *nodes]
    return ReplicaMetrics(replica=this_process(), families=families, account=context.account.sums)


async def _in_time(asked: Awaitable[Sequence[T]] | None) -> Sequence[T] | None:
    """Return the answer, or None if there is none in time: the others' are worth more than waiting."""
    if asked is None:
        return None
    try:
        return await asyncio.wait_for(asked, WAIT_S)
    except (TimeoutError, EngineError, RankError):
        return None
