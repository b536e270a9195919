"""A tuning job's progress as server-sent events.

`tuning_job.updated` (the job, whenever its summary changes), `tuning_job.measured` (a completed measurement; its
event id is a running count, so a client that reconnects with `last-event-id` misses none and gets none twice),
`tuning_job.progress` (the progress of the running measurement) and, last, `tuning_job.ended`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from plait_serving.http.edge import sse
from plait_serving.http.edge.errors import wire_error

__all__ = ["ENDED", "OVER", "Since", "job_events"]

MEASURED, UPDATED = "tuning_job.measured", "tuning_job.updated"
PROGRESS, ENDED = "tuning_job.progress", "tuning_job.ended"
OVER = frozenset({"finished", "failed", "cancelled"})
"""The statuses after which nothing more comes."""

Since = Callable[[int], Awaitable[Mapping[str, Any]]]
"""Returns what is new since the given number of measurements; see `TuningJobQueue.since`."""

_VOLATILE = ("used_s", "left_s")  # they change all the time; not worth an event


async def job_events(
    since: Since, known: int, *, poll_s: float, ping_s: float, first: Mapping[str, Any] | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a job until it is over. `known`: how many measurements the client has; `first`: a result of
    `since` that is already available. An error ends the stream and is its last event."""
    sent: Any = None
    progress: Any = None
    silent_s = 0.0
    try:
        while True:
            news = first or await since(known)
            first, job = None, dict(news["job"])
            chunks = []
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
    except Exception as error:  # the status line is gone; the stream's last event tells what happened
        yield sse.error_event(wire_error(error).body)
