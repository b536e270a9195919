"""`GET /metrics` in Prometheus' text format."""

from __future__ import annotations

import asyncio
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from plait_disagg.errors import RankError
from plait_serving.diffusion.errors import EngineError
from plait_serving.http.context import ContextDep, RouteContext
from plait_serving.http.edge.auth import Principal, Role, principal

router = APIRouter(tags=["operations"])

_WAIT_S = 5.0
"""A replica answers in milliseconds, on a busy host in a second or two."""
_UP = (
    "# HELP plait_service_up Whether the service's own metrics are in this answer; 0: it did not answer in time\n"
    "# TYPE plait_service_up gauge\n"
)


TENANT_PREFIX = "plait_tenant_"
"""Counters of this name with the label `tenant` are the account of what each tenant used."""


class _Measured(Protocol):
    async def metrics_text(self) -> str:
        """Return the service's metrics as Prometheus text."""


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(context: ContextDep, who: Annotated[Principal, Depends(principal)]) -> Response:
    """Return the HTTP side's metrics followed by those of the ranking and image services. What each tenant used is for
    admins."""
    text = await exposition(context)
    if who.role is not Role.ADMIN:
        text = "".join(line for line in text.splitlines(keepends=True) if TENANT_PREFIX not in line.split("{")[0])
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def exposition(context: RouteContext) -> str:
    """Return all metrics in Prometheus' text format."""
    services = {"ranking": context.ranking, "images": context.images}
    asked = {name: service for name, service in services.items() if service is not None}
    texts = await asyncio.gather(*map(_text_of, asked.values()))
    up = [
        f'plait_service_up{{service="{name}"}} {int(text is not None)}\n'
        for name, text in zip(asked, texts, strict=True)
    ]
    return "".join([context.metrics.text().decode(), _UP, *up, *filter(None, texts)])


async def _text_of(service: _Measured) -> str | None:
    """Return a service's metrics, or None if it does not answer in time: the others' are worth more than waiting."""
    try:
        return await asyncio.wait_for(service.metrics_text(), _WAIT_S)
    except (TimeoutError, EngineError, RankError):
        return None
