"""``GET /metrics`` in Prometheus' text format."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from plait_serving.http.context import ContextDep

router = APIRouter(tags=["operations"])


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(context: ContextDep) -> Response:
    """The HTTP side's metrics followed by the service's own."""
    own = context.metrics.text()
    service = (await context.service.metrics_text()).encode()
    return Response(own + service, headers={"content-type": CONTENT_TYPE_LATEST})
