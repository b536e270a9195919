"""Two tenants on one server, and requests at an even rate: what `fairness` and `neighbours` have in common."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

__all__ = ["KEYS", "cancelled", "configuration", "offered"]

T = TypeVar("T")

KEYS = {"a": "the key of the tenant who asks too much", "b": "the key of the other tenant"}


def configuration(**images: Any) -> str:
    """Return the plait.yaml of a server for both tenants; `images` is its section of that name."""
    keys = [{"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant} for tenant, key in KEYS.items()]
    return json.dumps({"server": {"api_keys": keys}, "images": images, "recommend": None})  # JSON is YAML


async def offered(send: Callable[[int], Awaitable[T]], per_s: float, seconds: float) -> list[tuple[T, float]]:
    """Call `send` with 0, 1, ... at an even rate, whatever becomes of it; return what came of each call, with the
    seconds from when it was due until its end."""
    began_s = time.monotonic()

    async def one(number: int) -> tuple[T, float]:
        due_s = began_s + number / per_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        result = await send(number)
        return result, time.monotonic() - due_s

    return await asyncio.gather(*(one(number) for number in range(max(1, round(per_s * seconds)))))


@asynccontextmanager
async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> AsyncIterator[None]:
    """Have these tasks disconnect at the end."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
