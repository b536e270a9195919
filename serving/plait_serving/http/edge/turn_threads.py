"""Threads for what clients bring, apart from the event loop and from each other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class TurnThreads:
    """Runs work on `threads` threads of its own. A thread belongs to its work until that ends, whether somebody still
    waits for it or not; work that nobody waits for any more does not begin. Of the tenants whose work waits, each has
    its turn, however much another one brings. A thread that `rests` does so after each work for as long as it took."""

    def __init__(self, threads: int, name: str, *, rests: bool = False) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._rests = rests
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Future[Any]]] = {}
        self._work: dict[Future[Any], Callable[[], Any]] = {}

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises."""
        job: Future[T] = Future()
        self._work[job] = work
        job.add_done_callback(lambda done: self._work.pop(done, None))  # at once, if its caller leaves
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(job)
        self._pool.submit(self._run_next)
        done = asyncio.wrap_future(job)
        try:
            return await done
        finally:
            del job, done  # an error that holds its own frames would stay, and with it the body that it is about

    def _run_next(self) -> None:
        with self._lock:
            tenant = next(iter(self._waiting))
            jobs = self._waiting.pop(tenant)
            job = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs  # as the last one
        began_s = time.monotonic()
        if job.set_running_or_notify_cancel():
            self._finish(job)
        del job  # as above
        if self._rests:
            time.sleep(time.monotonic() - began_s)

    def _finish(self, job: Future[Any]) -> None:
        try:
            result = self._work[job]()
        except BaseException as error:  # of whatever kind: somebody waits
            job.set_exception(error)
        else:
            job.set_result(result)
        finally:
            del job  # as above


READING = TurnThreads(1, "plait-read", rests=True)
"""For what holds the interpreter while it reads: long bodies, prompts with marks. The event loop needs the interpreter
ten times for the smallest request, and each time waits for every thread that computes, and for what one does in one go
(50 ms of 59 MB)."""
