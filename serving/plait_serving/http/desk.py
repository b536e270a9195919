"""What A1111's API remembers of each tenant: the checkpoint that it chose, and its requests that run.

A1111 has one user: what anyone sets or interrupts is everybody's. Here it is the tenant's, of requests made through
this API alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobState:
    """A request that runs: how old it is, in seconds, and how many of its `steps` are done."""

    age_s: float
    step: int
    steps: int

    @property
    def progress(self) -> float:
        """The share that is done; not 0, which means that nothing runs."""
        return max(0.01, self.step / max(self.steps, 1))


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request as long as it runs."""

    tenant: str
    began_s: float
    steps: int
    step: int = 0
    interrupted: bool = False
    _task: asyncio.Future[Any] | None = field(default=None, init=False)

    async def run(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what the work returns, or None if it was interrupted."""
        self._task = task = asyncio.ensure_future(work)
        if self.interrupted:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            here = asyncio.current_task()
            if self.interrupted and here is not None and not here.cancelling():
                return None
            raise

    def interrupt(self) -> None:
        """Give up the work."""
        self.interrupted = True
        if self._task is not None:
            self._task.cancel()


class Desk:
    """The one of a server with a single process for HTTP; `deployments` has one for several."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._jobs: list[Job] = []
        self._checkpoints: dict[str, str] = {}

    async def checkpoint(self, tenant: str) -> str | None:
        """Return the model that a tenant chose, or None."""
        return self._checkpoints.get(tenant)

    async def choose(self, tenant: str, model: str) -> None:
        """Remember a tenant's model."""
        self._checkpoints[tenant] = model

    async def jobs(self, tenant: str, *, interrupts: bool = False) -> Sequence[JobState]:
        """Return what runs for a tenant, the oldest first, and interrupt it if asked to."""
        return self.own_jobs(tenant, interrupts=interrupts)

    def own_jobs(self, tenant: str, *, interrupts: bool) -> list[JobState]:
        """Do the same for what runs through this process."""
        found = [job for job in self._jobs if job.tenant == tenant]
        for job in found if interrupts else ():
            job.interrupt()
        now_s = self._monotonic_s()
        return [JobState(now_s - job.began_s, job.step, job.steps) for job in found]

    @contextmanager
    def opened(self, tenant: str, steps: int) -> Iterator[Job]:
        """Have a request be known while it runs."""
        job = Job(tenant=tenant, began_s=self._monotonic_s(), steps=steps)
        self._jobs.append(job)
        try:
            yield job
        finally:
            self._jobs.remove(job)
