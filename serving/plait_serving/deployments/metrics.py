"""The metrics of all replicas of a deployment, through Serve, within a bounded time."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

__all__ = ["AllReplicas", "MetricsText", "this_process"]

_log = logging.getLogger(__name__)

ANSWER_S = 0.7
"""How long a replica may take to answer: on a quiet host it takes milliseconds, and a scrape waits for a second."""
_KEPT_S = 60.0
"""For how long a replica that is too busy to answer is shown as it was last; then it is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsText:
    """What one replica counts, in Prometheus' text format, and that replica's name."""

    replica: str
    text: str


def this_process() -> str:
    """Return a name that no other replica has."""
    return f"{socket.gethostname()}/{os.getpid()}"


class AllReplicas:
    """Asks every replica of a deployment for its `metrics_text`; whoever asks meanwhile gets the same answers.

    A replica that does not answer in time, although others do, is shown as it was last: a counter that was missing in
    one scrape would look like a restart.
    """

    def __init__(self, handle: Callable[[], Any], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take what returns Serve's handle; it is called later, on a thread, and may block."""
        self._make_handle = handle
        self._handle: Any = None
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "plait-metrics")
        self._asking: asyncio.Task[Mapping[str, str]] | None = None
        self._last: dict[str, tuple[str, float]] = {}

    async def texts(self) -> Mapping[str, str]:
        """Return the texts by replica; none if no replica answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Mapping[str, str]:
        answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._broadcast)
        now_s = self._clock()
        fresh = {answer.replica: answer.text for answer in answers if isinstance(answer, MetricsText)}
        if not fresh:
            return {}
        too_slow = sum(isinstance(answer, TimeoutError) for answer in answers)
        others = [name for name, (_, at_s) in self._last.items() if name not in fresh and now_s - at_s <= _KEPT_S]
        others.sort(key=lambda name: self._last[name][1], reverse=True)
        old = {name: self._last[name] for name in others[:too_slow]}
        self._last = {name: (text, now_s) for name, text in fresh.items()} | old
        return {name: text for name, (text, _) in self._last.items()}

    def _broadcast(self) -> Sequence[Any]:
        try:
            if self._handle is None:
                self._handle = self._make_handle()
            response = self._handle.broadcast("metrics_text")
            answers: Sequence[Any] = response.results(timeout_s=ANSWER_S, return_exceptions=True)
        except Exception as error:  # Ray's and Serve's errors have no common base
            _log.info("no replica answers for its metrics: %s", error)
            return ()
        return answers
