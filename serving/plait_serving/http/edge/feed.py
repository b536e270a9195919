"""Reads a service's events and detects client disconnects without ever losing either.

Plain asyncio on purpose: in a task group of another library every `await` of a clean-up is cancelled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from starlette.types import Receive

from plait_serving.diffusion.errors import EngineStopped
from plait_serving.diffusion.values import Event, Failed, Finished, ImageResult, Preview, Progress
from plait_serving.http.edge.errors import ClientDisconnected

T = TypeVar("T")

News: TypeAlias = Progress | Preview | Finished


class EventFeed:
    """Owns a generator of events. A read that times out continues and is picked up by the next read."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self._reading: asyncio.Task[News] | None = None

    async def next(self, timeout_s: float | None = None) -> News | None:
        """Return the next event, or None after `timeout_s`. Raises the request's error, and `EngineStopped` if the
        generator ends early."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        if not done:
            return None
        task, self._reading = self._reading, None
        return task.result()

    async def _read(self) -> News:
        event = await anext(self._events, None)
        if event is None:
            raise EngineStopped("the service ended without a result")
        if isinstance(event, Failed):
            raise event.error
        return event

    async def aclose(self) -> None:
        """Close the generator, which cancels the work behind it. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        await self._events.aclose()


async def finished(
    events: AsyncGenerator[Event, None], told: Callable[[Progress], None] = lambda _: None
) -> ImageResult:
    """Return what a request's events end with; its progress is `told`. Raises the request's error."""
    feed = EventFeed(events)
    try:
        while not isinstance(event := await feed.next(), Finished):
            if isinstance(event, Progress):
                told(event)
    finally:
        await feed.aclose()
    return event.result


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; if the client disconnects first, cancel it, wait for its clean-up and raise `ClientDisconnected`.

    The request's body must have been read: `receive` then yields nothing but the disconnect.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
