"""`GET /health` and `GET /version`, open to load balancers without a key."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from plait_serving.http.context import ContextDep, installed_version
from plait_serving.http.edge.errors import ApiError

router = APIRouter(tags=["operations"])


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
