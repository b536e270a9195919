"""How the server is, and what it counts: `/health` and `/version`, open to load balancers without a key; `/metrics` in
Prometheus' text format; `/v1/usage`, each tenant's part of it; `/v1/status`, for people, in one small answer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from plait_disagg.errors import RankError
from plait_kernels.cores import instruction_set
from plait_serving.diffusion.errors import EngineError, EngineStopped
from plait_serving.http.context import ContextDep, RouteContext, installed_version
from plait_serving.http.edge.auth import Principal, principal
from plait_serving.http.edge.errors import ApiError
from plait_serving.http.edge.refusals import IMAGE_PATHS
from plait_serving.replica_metrics import (
    REPLICA,
    ReplicaMetrics,
    exposition,
    family,
    tenant_families,
    this_process,
)
from plait_serving.sections import Role

router = APIRouter(tags=["operations"])

T = TypeVar("T")

WAIT_S = 0.85
"""Whatever is down, a scrape is answered within a second."""
_UP = "Whether the service's own metrics are in this answer; 0: it did not answer in time"


_NOT_READY = {
    "description": "Not ready; `reason` says what is missing",
    "content": {"application/json": {"schema": {"type": "object", "required": ["status", "ready", "reason"]}}},
}


@router.get("/health", summary="Ready to make images, and to rank?", responses={503: _NOT_READY})
async def health(context: ContextDep, workload: str | None = None) -> JSONResponse:
    """Return 200 if the server is ready, else 503 with the reasons.

    It is ready once a warm-up image was made and while the engine and every ranking model are alive; with `workload`,
    only what `images` or `ranking` needs counts.
    """
    if workload is not None and workload not in context.workloads:
        known = " or ".join(context.workloads)
        raise ApiError(400, f"workload is {known} here", code="invalid_value", param="workload")
    state = await context.health(workload)
    body = {"status": "ok" if state.ready else "unavailable", **asdict(state)}
    return JSONResponse(body, status_code=200 if state.ready else 503, headers={"cache-control": "no-store"})


@router.get("/version", summary="Version")
async def version() -> dict[str, Any]:
    """Return the version of the server."""
    return {"name": "plait", "version": installed_version()}


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
    images = context.images
    own, others, of_images, catalog = await asyncio.gather(
        own_metrics(context),
        _in_time(None if context.neighbours is None else context.neighbours()),
        _in_time(None if images is None else images.counts()),
        _in_time(None if images is None else images.catalog()),
    )
    is_up = {"ranking": context.neighbours is None or others is not None, "images": of_images is not None}
    is_up = {name: up for name, up in is_up.items() if name in context.workloads}
    context.metrics.expect(IMAGE_PATHS, [card.name for card in catalog.models] if catalog else ())
    up = family("plait_service_up", _UP, {(name,): int(up) for name, up in is_up.items()}, "service")
    answers = [*(of_images or ()), *(others or ())]
    nodes = () if context.nodes is None else context.nodes([each.at for each in answers if each.at])
    answers = [replace(own, families=[*own.families, up, *nodes]), *answers]
    for each in answers:
        context.account.learn(each.account)
    families = [it for each in answers for it in each.labelled()]
    return Gathered(families=families, of_tenants=tenant_families(answers), is_up=is_up)


async def own_metrics(context: RouteContext) -> ReplicaMetrics:
    """Return what this process itself counts: of HTTP, and of the ranking requests that it sent."""
    ranking, me = None if context.ranking is None else await _in_time(context.ranking.metric_families()), this_process()
    families = [*context.metrics.registry.collect(), *(ranking or ())]
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


@router.get("/v1/usage", summary="What your tenant used")
async def usage(context: ContextDep, who: Annotated[Principal, Depends(principal)]) -> dict[str, Any]:
    """Return the sums of the caller's tenant, for an admin of all tenants, since the server started.

    What a replica that dies had counted in its last seconds is lost, and all of it with the last ingress: for bills,
    keep the metrics in Prometheus.
    """
    is_up = (await gather(context)).is_up.get("images", True)
    found = context.account.by_tenant()
    if not is_up and not context.account.knows(("images",)):  # of refusals ingresses know, too
        raise EngineStopped("the engine, which keeps the account, does not answer", retry_after_s=1.0)
    seen = found if who.role is Role.ADMIN else {who.tenant: found.get(who.tenant, {})}
    return {"object": "list", "data": [{"object": "usage", "tenant": name, **seen[name]} for name in sorted(seen)]}


class ReplicasStatus(BaseModel):
    """The replicas that answer now."""

    ingress: int
    engine: int


class QueueStatus(BaseModel):
    """Image requests over all replicas of the engine."""

    waiting: int
    running: int
    compute_s: float = Field(description="predicted seconds of compute that wait")


class ResidentStatus(BaseModel):
    """What the engine's replicas hold."""

    models: list[str] = Field(description="base models in the memory of any replica")
    model_bytes: int
    loras: int
    lora_bytes: int
    prepared: list[str] = Field(description="parts of the model that run as programs of the executor")


class StatusResponse(BaseModel):
    """Counts of the moment. A service that is not in `services` is not part of this server."""

    version: str
    ready: bool
    reason: str | None
    services: dict[str, bool]
    instruction_sets: list[str] = Field(
        description="widest vector instructions that the engine's hosts compute with; without images, the ingress's"
    )
    replicas: ReplicasStatus
    queue: QueueStatus
    resident: ResidentStatus
    images_made: int
    rankings_made: int


@router.get("/v1/status", summary="Replicas, queue and what is resident")
async def status(context: ContextDep) -> StatusResponse:
    """Return how the server is. What does not answer within a second counts as 0."""
    health = await context.health()
    gathered = await gather(context)
    number, labels = _read(gathered.families)
    return StatusResponse(
        version=installed_version(),
        ready=health.ready,
        reason=health.reason,
        services=gathered.is_up,
        instruction_sets=sorted(labels["plait_host_instruction_set"]) or [instruction_set()],
        replicas=ReplicasStatus(
            ingress=int(number["plait_ingress_replicas"]), engine=int(number["plait_engine_replicas"])
        ),
        queue=QueueStatus(
            waiting=int(number["plait_engine_requests_waiting"]),
            running=int(number["plait_engine_requests_running"]),
            compute_s=number["plait_engine_queued_compute_seconds"],
        ),
        resident=ResidentStatus(
            models=sorted(name for name, count in labels["plait_model_resident"].items() if count),
            model_bytes=int(number["plait_models_resident_bytes"]),
            loras=int(number["plait_lora_cache_resident"]),
            lora_bytes=int(number["plait_lora_cache_resident_bytes"]),
            prepared=sorted(labels["plait_engine_prepared"]),
        ),
        images_made=int(number["plait_images_total"]),
        rankings_made=int(number["plait_rank_duration_seconds_count"]),
    )


def _read(families: Iterable[Metric]) -> tuple[Mapping[str, float], Mapping[str, Mapping[str, float]]]:
    """Return sums of samples by name, and the largest by the value of each label."""
    sums: dict[str, float] = defaultdict(float)
    labels: dict[str, dict[str, float]] = defaultdict(dict)
    for each in families:
        for sample in each.samples:
            sums[sample.name] += sample.value
            for value in (value for key, value in sample.labels.items() if key != REPLICA):
                labels[sample.name][value] = max(sample.value, labels[sample.name].get(value, 0.0))
    return sums, labels
