"""The metrics of all replicas of a deployment, through Serve, within a bounded time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

from plait_serving.replica_metrics import ReplicaMetrics

_log = logging.getLogger(__name__)

ANSWER_S = 0.7
"""How long a replica may take to answer: on a quiet host it takes milliseconds, and a scrape waits for a second."""
_KEPT_S = 60.0
"""For how long the gauges of a replica that is too busy to answer are shown as they were last."""


def ask(handle: Any, method: str, *arguments: Any, timeout_s: float | None) -> list[Any]:
    """Return what the method returns, or raises, at each replica. Raises whatever Serve does. Blocks."""
    return list(handle.broadcast(method, *arguments).results(timeout_s=timeout_s, return_exceptions=True))


def ask_all(handle: Any, method: str, *arguments: Any, timeout_s: float | None) -> list[Any]:
    """Do the same; nothing if there is no replica."""
    try:
        return ask(handle, method, *arguments, timeout_s=timeout_s)
    except Exception as error:  # Ray's and Serve's errors have no common base
        _log.debug("no replica answers %s: %s", method, error)
        return []


class AllReplicas:
    """Asks every replica of a deployment for its `metric_families`; whoever asks meanwhile gets the same answers.

    Of a replica that does not answer in time, although others do, the gauges are shown as they were last: it still has
    its queue. Its counters are left out: another ingress may have told newer ones, and what falls looks like a restart.
    """

    def __init__(
        self, handle: Any = None, *, make: Callable[[], Any] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take Serve's handle, or what makes it: called later, on a thread, it may block."""
        self._handle = cache(make or (lambda: handle))
        self._response: Any = None
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "plait-metrics")
        self._asking: asyncio.Task[Sequence[ReplicaMetrics]] | None = None
        self._last: dict[str, tuple[ReplicaMetrics, float]] = {}

    async def answers(self) -> Sequence[ReplicaMetrics]:
        """Return what the replicas say; nothing if none answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def call(self, method: str, *arguments: Any) -> Sequence[Any]:
        """Return what each replica's method returns, or raises; nothing if none answers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._broadcast, method, *arguments)

    async def _ask(self) -> Sequence[ReplicaMetrics]:
        answers = await self.call("metric_families")
        now_s = self._clock()
        fresh = {answer.replica: answer for answer in answers if isinstance(answer, ReplicaMetrics)}
        if not fresh:
            return ()
        too_slow = sum(isinstance(answer, TimeoutError) for answer in answers)
        others = [name for name, (_, at_s) in self._last.items() if name not in fresh and now_s - at_s <= _KEPT_S]
        others.sort(key=lambda name: self._last[name][1], reverse=True)
        old = {name: self._last[name] for name in others[:too_slow]}
        self._last = {name: (answer, now_s) for name, answer in fresh.items()} | old
        return [*fresh.values(), *(_gauges(answer) for answer, _ in old.values())]

    def _broadcast(self, method: str, *arguments: Any) -> Sequence[Any]:
        try:
            # Kept until the next time: an answer that is late must still find somebody (`ReplicaMetrics.__reduce__`).
            self._response = self._handle().broadcast(method, *arguments)
            answers: Sequence[Any] = self._response.results(timeout_s=ANSWER_S, return_exceptions=True)
        except Exception as error:  # Ray's and Serve's errors have no common base
            _log.info("no replica answers %s: %s", method, error)
            return ()
        return answers


def _gauges(answer: ReplicaMetrics) -> ReplicaMetrics:
    return replace(answer, families=[each for each in answer.families if each.type == "gauge"], account={})
