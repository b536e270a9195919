"""The event loop's face of a core: a `Ranker` whose requests are futures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import cast

from plait_disagg.errors import DeadlinePassed, RankError
from plait_disagg.queue.jobs import Core, Outcome, RankJob
from plait_disagg.values import ModelCard, RankAnswer, RankRequest


class CoreRanker:
    """A `Ranker` around any core, which it owns."""

    def __init__(self, core: Core) -> None:
        self.core = core

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
        """Resolve the futures, which are the jobs' tickets, with one wake-up of their loop; if that is closed, nothing
        waits for them."""
        first = outcomes[0][0].ticket
        with contextlib.suppress(RuntimeError):
            cast("asyncio.Future[RankAnswer]", first).get_loop().call_soon_threadsafe(_resolve, outcomes)


def _resolve(outcomes: Sequence[tuple[RankJob, Outcome]]) -> None:
    for job, outcome in outcomes:
        future = job.ticket
        if not isinstance(future, asyncio.Future) or future.done():
            continue
        if isinstance(outcome, RankError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
