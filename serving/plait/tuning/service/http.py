"""`/v1/tuning/jobs`: tuning jobs over HTTP. All routes need a key with the role admin.

A job is the YAML (or JSON) of `plait tune run`. It tunes a clone of this server's application, and names no files,
because the client has none here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from plait.config import TuningSection
from plait.server.state import state_root
from plait_report.page import POLICY
from plait_serving.http.context import ContextDep
from plait_serving.http.edge import sse
from plait_serving.http.edge.auth import Principal, require_admin
from plait_serving.http.edge.errors import ApiError, wire_error
from plait_serving.http.edge.sse import EventStream

if TYPE_CHECKING:
    from plait.tuning.service.actor import ActorTuningService

MAX_JOB_BYTES = 1 << 20
_TYPES = ("application/json", "application/yaml", "application/x-yaml", "text/yaml")
"""Content types that another site's web page cannot send without a preflight request."""

Admin = Annotated[Principal, Depends(require_admin)]


def tuning_router(service: ActorTuningService, *, poll_s: float = 1.0) -> APIRouter:
    """Return the router. `poll_s`: how often an event stream checks for news."""
    router = APIRouter(prefix="/v1/tuning/jobs", tags=["tuning"], dependencies=[Depends(require_admin)])

    @router.post("", summary="Start a tuning job", status_code=202, openapi_extra=_BODY)
    async def submit(request: Request, admin: Admin) -> JSONResponse:
        """Submit a job and return at once; jobs run one after the other."""
        job = await service.submit(await _job_text(request), admin.tenant)
        return JSONResponse(job, status_code=202, headers={"location": f"/v1/tuning/jobs/{job['id']}"})

    @router.get("", summary="The tuning jobs")
    async def jobs() -> dict[str, Any]:
        """List all jobs, newest first."""
        return {"object": "list", "data": await service.call("jobs")}

    @router.get("/{job_id}", summary="One tuning job")
    async def job(job_id: str) -> dict[str, Any]:
        """Return one job; `state` has every measurement."""
        return dict(await service.call("job", job_id))

    @router.post("/{job_id}/cancel", summary="Give a tuning job up")
    async def cancel(job_id: str) -> dict[str, Any]:
        """Cancel a job. Its running measurement is aborted; a live service gets its original configuration back."""
        return dict(await service.call("cancel", job_id))

    @router.get("/{job_id}/events", summary="Follow a tuning job", response_class=Response, responses={200: _EVENTS})
    async def events(job_id: str, request: Request, context: ContextDep) -> Response:
        """Stream server-sent events until the job is over; `last-event-id` resumes a broken connection."""
        since = partial(service.call, "since", job_id)
        first = await since(known := _known(request.headers.get("last-event-id")))
        ping_s = context.settings.ping_interval_s
        return EventStream(job_events(since, known, poll_s=poll_s, ping_s=ping_s, first=first))

    @router.get("/{job_id}/report", summary="The report of a tuning job", response_class=HTMLResponse)
    async def report(job_id: str) -> HTMLResponse:
        """Return the report as one HTML page, even if the job is not over."""
        page = await service.call("report", job_id)
        headers = {"content-security-policy": f"{POLICY}; frame-ancestors 'none'", "cache-control": "no-store"}
        return HTMLResponse(page, headers=headers)

    return router


_EVENTS: dict[str, Any] = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}

_FIRST_JOB = {
    "name": "batches",
    "target": {"app": "images"},
    "knobs": {"batch": {"kind": "choice", "values": [4, 8, 16], "ordered": True, "sets": "engine.largest_batch"}},
    "scenarios": ["smoke"],
    "reference": {"config": {"batch": 16}},
    "budget": {"trials": 3, "minutes": 5},
}
_BODY = {
    "requestBody": {
        "required": True,
        "description": "the job, as `plait tune run` reads it",
        "content": {
            "application/json": {"schema": {"type": "object"}, "example": _FIRST_JOB},
            "application/yaml": {"schema": {"type": "object"}},
        },
    }
}


async def _job_text(request: Request) -> str:
    """Return the body. Raises `ApiError`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _TYPES:
        message = "send the job with content-type: application/yaml or application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    body = await request.body()
    if len(body) > MAX_JOB_BYTES:
        raise ApiError(413, f"a job may have {MAX_JOB_BYTES} bytes", code="body_too_large")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, "the job is not UTF-8", code="invalid_job") from error


def _known(header: str | None) -> int:
    """Return how many measurements a client has; a header in another format counts as none."""
    return int(header) if header is not None and header.isascii() and header.isdigit() and len(header) < 9 else 0


MEASURED, UPDATED = "tuning_job.measured", "tuning_job.updated"
PROGRESS, ENDED = "tuning_job.progress", "tuning_job.ended"
OVER = frozenset({"finished", "failed", "cancelled"})
"""The statuses after which nothing more comes."""

Since = Callable[[int], Awaitable[Mapping[str, Any]]]
"""Returns what is new since the given number of measurements; see `TuningJobQueue.since`."""

_VOLATILE = ("used_s", "left_s")  # they change all the time; not worth an event


async def job_events(
    since: Since, known: int, *, poll_s: float, ping_s: float, first: Mapping[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a job until it is over. `known`: how many measurements the client has; `first`: what `since`
    says of them. An error ends the stream and is its last event.

    `tuning_job.updated` (the job, whenever its summary changes), `tuning_job.measured` (a completed measurement; its
    event id is a running count, so a client that reconnects with `last-event-id` misses none and gets none twice),
    `tuning_job.progress` (the progress of the running measurement) and, last, `tuning_job.ended`.
    """
    sent: Any = None
    progress: Any = None
    silent_s, news = 0.0, first
    try:
        while True:
            job, chunks = news["job"], list[bytes]()
            for row in news["measured"]:
                known += 1
                chunks.append(f"id: {known}\n".encode("ascii") + sse.event(MEASURED, row))
            if (now := {name: value for name, value in job.items() if name not in _VOLATILE}) != sent:
                sent = now
                chunks.append(sse.event(ENDED if job["status"] in OVER else UPDATED, job))
            if news["progress"] not in (progress, None) and job["status"] == "running":
                progress = news["progress"]
                chunks.append(sse.event(PROGRESS, progress))
            silent_s = 0.0 if chunks else silent_s + poll_s
            if silent_s >= ping_s:
                silent_s = 0.0
                chunks.append(sse.PING)
            for chunk in chunks:
                yield chunk
            if job["status"] in OVER:
                return
            await asyncio.sleep(poll_s)
            news = await since(known)
    except Exception as error:  # the status line is gone; the stream's last event tells what happened
        yield sse.error_event(wire_error(error).body)


def tuning_routers(user_config: Mapping[str, Any], *, tuning: TuningSection) -> tuple[APIRouter, ...]:
    """Return the routers for tuning jobs; called in the ingress replica. `user_config`: as it is at any moment; its
    `config` is what runs."""
    from plait.tuning.service.actor import ActorTuningService
    from plait.tuning.service.job_queue import JobQueueSettings

    folder = tuning.folder or state_root(os.environ) / "tuning"

    def settings() -> JobQueueSettings:
        return JobQueueSettings(folder=folder, config=yaml.safe_dump(user_config["config"]), live=tuning.live)

    return (tuning_router(ActorTuningService(settings)),)
