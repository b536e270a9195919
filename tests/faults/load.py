"""A load at an even pace, some of whose clients leave in the middle."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from faults.asks import Ask, Form
from faults.client import FaultClient, Reply

__all__ = ["Pace", "draw", "send_all", "send_at_pace"]

_WEIGHTS: dict[Form, float] = {"ranking": 1.2, "v2": 2.0, "image": 0.5, "stream": 0.5}
"""How often a request is drawn: about three rankings to two images, which take far longer."""

_MAX_OPEN = 256
"""Requests in flight at most; more wait here, as they would in front of any client's pool."""

_LEAVE_WITHIN_S = 1.0

OnReply = Callable[[Ask, Reply], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Requests per second on average, and the share of those whose client leaves within a second."""

    per_s: float
    disconnects: float = 0.0
    seed: int = 1


def draw(asks: Sequence[Ask], rng: random.Random) -> Iterator[Ask]:
    """Draw requests without end."""
    weights = [_WEIGHTS[ask.form] for ask in asks]
    while True:
        yield from rng.choices(asks, weights, k=64)


async def send_at_pace(
    client: FaultClient, asks: Sequence[Ask], pace: Pace, on_reply: OnReply, *, until: Callable[[], bool]
) -> int:
    """Send requests until `until` returns true, then wait until all have ended; return how many were sent.

    Times, requests and disconnects are drawn from the pace's seed, and do not depend on what the server does.
    """
    rng = random.Random(pace.seed)
    chosen = draw(asks, random.Random(pace.seed))
    room = asyncio.Semaphore(_MAX_OPEN)
    open_tasks: set[asyncio.Task[None]] = set()
    sent = 0
    next_s = time.monotonic()

    async def one(ask: Ask, leave_after_s: float | None) -> None:
        try:
            on_reply(ask, await client.send(ask, leave_after_s=leave_after_s))
        finally:
            room.release()

    while not until():
        next_s += rng.expovariate(pace.per_s)
        ask = next(chosen)
        leaves, after_s = rng.random() < pace.disconnects, rng.uniform(0.0, _LEAVE_WITHIN_S)
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        await room.acquire()
        task = asyncio.create_task(one(ask, after_s if leaves else None))
        open_tasks.add(task)
        task.add_done_callback(open_tasks.discard)
        sent += 1
    await asyncio.gather(*open_tasks)
    return sent


async def send_all(client: FaultClient, asks: Sequence[Ask], *, at_once: int) -> list[tuple[Ask, Reply]]:
    """Send each request once, so many at a time; return the replies in the order of the requests."""
    room = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> tuple[Ask, Reply]:
        async with room:
            return ask, await client.send(ask)

    return await asyncio.gather(*(one(ask) for ask in asks))
