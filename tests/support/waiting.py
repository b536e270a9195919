"""Waiting for a condition: never for a duration; and a clock that only a test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_PATIENCE_S = 120.0


class Clock:
    """Time that stands still until a test moves it."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def wait_for(
    condition: Callable[[], object], timeout_s: float = _PATIENCE_S, *, what: Callable[[], object] = lambda: "it"
) -> None:
    """Returns as soon as ``condition`` holds; ``what`` says what never did."""
    began_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s, f"{what()} never came true"
        time.sleep(min(0.1, 0.005 + waited_s / 50))  # what takes long, as a process that starts, needs the core itself


async def until(condition: Callable[[], object]) -> None:
    """Returns as soon as ``condition`` holds, while the event loop goes on; raises TimeoutError after two minutes."""
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # the fakes are counters, not events
            await asyncio.sleep(0.002)


async def settled() -> None:
    """Tasks have done what they can."""
    for _ in range(10):
        await asyncio.sleep(0)
