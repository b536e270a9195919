"""Serve's handles where one call to one replica will not do: all replicas of a deployment are asked at once, their
metrics within a bounded time; and the deployments of a model are called as one.

Of these there is one for each class of nodes (`plait_deploy.on_ray`), and most of them may have no replica. Serve would
keep a request to such a one until it has, and give it one, wherever the plan wants it; so requests go only where Serve
has told this process of replicas, and broadcasts go to all.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from plait_serving.deployments.ray_internals import known_replicas
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


class PlacedHandle:
    """Behaves like Serve's handle, as far as plait uses one: `broadcast`, `options`, and methods with `remote`."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        """Take the handles by class of nodes; when the application is built, deployments, which Serve replaces."""
        self._handles = dict(handles)

    def options(self, **options: Any) -> PlacedHandle:
        """Return a handle with these options."""
        return PlacedHandle({of: handle.options(**options) for of, handle in self._handles.items()})

    def broadcast(self, method: str, *arguments: Any) -> SimpleNamespace:
        """Call the method on every replica of every deployment; those without replicas have no answers."""

        def results(*, timeout_s: float | None, return_exceptions: bool) -> list[Any]:
            assert return_exceptions, "nobody asks otherwise"
            with ThreadPoolExecutor(len(self._handles)) as threads:
                found = threads.map(
                    lambda handle: ask_all(handle, method, *arguments, timeout_s=timeout_s), self._handles.values()
                )
                return [answer for each in found for answer in each]

        return SimpleNamespace(results=results)

    def __getattr__(self, method: str) -> SimpleNamespace:
        if method.startswith("_"):
            raise AttributeError(method)

        def remote(*given: Any) -> Any:
            methods = [getattr(handle, method) for handle in self._handles.values()]  # from then on Serve tells of each
            counts = [len(known_replicas(each)) for each in methods]
            chosen = random.choices(methods, counts)[0] if any(counts) else methods[0]
            return chosen.remote(*given)

        return SimpleNamespace(remote=remote)
