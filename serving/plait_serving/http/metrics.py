"""`GET /metrics` in Prometheus' text format."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from plait_serving.http.context import ContextDep

router = APIRouter(tags=["operations"])


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(context: ContextDep) -> Response:
    """Return the HTTP side's metrics followed by those of the ranking and image services."""
    services = [service for service in (context.ranking, context.images) if service is not None]
    parts = [context.metrics.text().decode(), *[await service.metrics_text() for service in services]]
    return Response("".join(parts), headers={"content-type": CONTENT_TYPE_LATEST})
