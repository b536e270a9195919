"""``GET /health`` and ``GET /version``, open to load balancers without a key."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from plait_serving.http.context import Context, ContextDep, installed_version
from plait_serving.images.service import Health

router = APIRouter(tags=["operations"])


@router.get("/health", summary="Ready to make pictures, and to rank?")
async def health(context: ContextDep) -> JSONResponse:
    """200 once a warm-up picture was made and while the engine and every ranker live, else 503 with the reason."""
    state = await _state(context)
    body = {"status": "ok" if state.ready else "unavailable", **asdict(state)}
    return JSONResponse(body, status_code=200 if state.ready else 503, headers={"cache-control": "no-store"})


@router.get("/version", summary="Version")
async def version() -> dict[str, Any]:
    """The version of the server."""
    return {"name": "plait", "version": installed_version()}


async def missing(context: Context) -> str | None:
    """None if everything that the server offers works now; else what does not."""
    state = await _state(context)
    return None if state.ready else state.reason or "not ready"


async def _state(context: Context) -> Health:
    """The image service's health first: its warm-up takes longest."""
    state = Health(ready=True) if context.images is None else await context.images.health()
    reason = await context.recommenders.missing() if state.ready else None
    return state if reason is None else Health(ready=False, reason=reason, warmup_s=state.warmup_s)
