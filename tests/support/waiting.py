"""Waiting for a condition: never for a duration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Returns as soon as ``condition`` holds."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it never came true"
        time.sleep(0.005)


async def until(condition: Callable[[], object]) -> None:
    """Returns as soon as ``condition`` holds, while the event loop goes on; raises TimeoutError after 60 s."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the fakes are counters, not events
            await asyncio.sleep(0.002)
