"""`GET /metrics` in Prometheus' text format."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from plait_disagg.errors import RankError
from plait_serving.diffusion.errors import EngineError
from plait_serving.http.context import ContextDep, RouteContext
from plait_serving.http.edge.auth import Principal, Role, principal
from plait_serving.replica_metrics import merge

__all__ = ["NO_IMAGES", "TENANT_PREFIX", "exposition", "own_text", "router"]

router = APIRouter(tags=["operations"])

_WAIT_S = 0.85
"""Whatever is down, a scrape is answered within a second."""
_UP = (
    "# HELP plait_service_up Whether the service's own metrics are in this answer; 0: it did not answer in time\n"
    "# TYPE plait_service_up gauge\n"
)


NO_IMAGES = 'plait_service_up{service="images"} 0\n'
"""The line that says that the image service's metrics are missing."""
TENANT_PREFIX = "plait_tenant_"
"""Counters of this name with the label `tenant` are the account of what each tenant used."""


class _Measured(Protocol):
    async def metrics_text(self) -> str:
        """Return the service's metrics as Prometheus text."""


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(context: ContextDep, who: Annotated[Principal, Depends(principal)]) -> Response:
    """Return the HTTP side's metrics, of all ingress replicas, followed by those of the image service. What each tenant
    used is for admins."""
    text = await exposition(context)
    if who.role is not Role.ADMIN:
        text = "\n".join(line for line in text.split("\n") if TENANT_PREFIX not in line.split("{")[0])
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def exposition(context: RouteContext) -> str:
    """Return all metrics in Prometheus' text format."""
    (own, ranking_up), others, images = await asyncio.gather(_own(context), _others(context), _text_of(context.images))
    up = {}
    if context.ranking is not None:
        up["ranking"] = ranking_up
    if context.images is not None:
        up["images"] = images is not None
    lines = [f'plait_service_up{{service="{name}"}} {int(is_up)}\n' for name, is_up in up.items()]
    return "".join([merge([own, *others]), _UP, *lines, images or ""])


async def own_text(context: RouteContext) -> str:
    """Return what this process itself counts: of HTTP, and of the ranking requests that it sent."""
    return (await _own(context))[0]


async def _own(context: RouteContext) -> tuple[str, bool]:
    ranking = await _text_of(context.ranking)
    nodes = "" if context.nodes is None else await context.nodes()
    return context.metrics.text().decode() + (ranking or "") + nodes, ranking is not None


async def _others(context: RouteContext) -> Sequence[str]:
    """Return what the other ingress replicas count; those that do not answer in time are missing."""
    if context.neighbours is None:
        return ()
    try:
        return await asyncio.wait_for(context.neighbours(), _WAIT_S)
    except TimeoutError:
        return ()


async def _text_of(service: _Measured | None) -> str | None:
    """Return a service's metrics, or None if it does not answer in time: the others' are worth more than waiting."""
    if service is None:
        return None
    try:
        return await asyncio.wait_for(service.metrics_text(), _WAIT_S)
    except (TimeoutError, EngineError, RankError):
        return None
