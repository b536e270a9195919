"""The event loop's face of a core: a `Ranker` whose requests are futures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import cast

from plait_disagg.errors import DeadlinePassed, RankError
from plait_disagg.queue.jobs import Core, Outcome, RankJob
from plait_disagg.values import ModelCard, RankAnswer, RankRequest


class CoreRanker:
    """A `Ranker` around any core, which it owns."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._arrived: deque[tuple[RankJob, Outcome]] = deque()
        self._woken: asyncio.AbstractEventLoop | None = None

    @property
    def card(self) -> ModelCard:
        """The model's card. Raises `WorkerUnavailable` until a worker has reported it."""
        return self.core.card

    async def rank(self, request: RankRequest) -> RankAnswer:
        """Submit the request to the core and await its outcome; cancelling the task cancels the job."""
        future: asyncio.Future[RankAnswer] = asyncio.get_running_loop().create_future()
        job = RankJob(request=request, sink=self, ticket=future)
        self.core.submit(job)
        left_s = None if request.deadline_s is None else request.deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                return await future
        except TimeoutError:
            self.core.cancel(job)
            raise DeadlinePassed("the deadline passed before the answer was there") from None
        except (asyncio.CancelledError, DeadlinePassed):
            self.core.cancel(job)
            raise

    async def ready(self) -> str | None:
        """Return None if a request would be answered now, otherwise what is missing."""
        return self.core.ready()

    def metrics(self) -> Mapping[str, float]:
        """Return the core's metrics."""
        return self.core.metrics()

    async def close(self, *, drain_s: float) -> None:
        """Stop the core on a thread, without blocking the event loop."""
        await asyncio.to_thread(self.core.stop, drain_s=drain_s)

    def deliver(self, outcomes: Sequence[tuple[RankJob, Outcome]]) -> None:
        """Have the futures, which are the jobs' tickets, resolved by their loop. One that was woken and has not come to
        it yet, as it is busy with other requests, takes these with it: to wake it costs a call of the system, in which
        both threads want the interpreter. If it is closed, nothing waits for them."""
        self._arrived.extend(outcomes)
        loop = cast("asyncio.Future[RankAnswer]", outcomes[0][0].ticket).get_loop()
        if self._woken is not loop:
            self._woken = loop
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        self._woken = None  # first: what arrives from now on may come too late for this turn
        while self._arrived:
            job, outcome = self._arrived.popleft()
            future = job.ticket
            if not isinstance(future, asyncio.Future) or future.done():
                continue
            if isinstance(outcome, RankError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
