"""One call for all who ask at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["SingleFlight"]

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Makes a call for everybody who asked before it began: nobody gets an answer from before the question.

    One call is made at a time; the next one begins when it has ended, or after `patience_s` if it hangs.
    """

    def __init__(self, call: Callable[[], Awaitable[T]], *, patience_s: float) -> None:
        self._call = call
        self._patience_s = patience_s
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def ask(self) -> T:
        """Return the answer. Raises what the call raises; who is cancelled leaves it to the others."""
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._running))
            self._next.add_done_callback(_seen)
        return await asyncio.shield(self._next)

    async def _after(self, before: asyncio.Task[T] | None) -> T:
        if before is not None and not before.done():
            await asyncio.wait([before], timeout=self._patience_s)
        self._running, self._next = self._next, None
        return await self._call()


def _seen(task: asyncio.Task[T]) -> None:
    """Let asyncio not complain where everybody who asked was cancelled."""
    if not task.cancelled():
        task.exception()
