"""Load on a ranker without HTTP: requests, a closed loop, and the arrival times of an open loop."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from plait_bench.errors import SystemFailed
from plait_disagg.messages.check import check_request
from plait_disagg.models.configs import ids_per_bag
from plait_disagg.models.requests import random_request
from plait_disagg.package import Package
from plait_disagg.protocols import Ranker
from plait_disagg.queue.jobs import Core
from plait_disagg.values import RankRequest

__all__ = ["Asked", "arrivals", "asked", "closed_loop_per_s", "gc_paused", "requests_of", "wait_until_ready"]

_LOOK_S = 0.01


def requests_of(package: Package, model: str, *, candidates: int, count: int, first_seed: int = 0) -> list[RankRequest]:
    """Make distinct requests with skewed ids for the configuration `model`, validated as a server would."""
    manifest = package.manifest
    made = [
        random_request(
            manifest.inputs, manifest.bounds, model=manifest.name, candidates=candidates,
            ids_per_bag=ids_per_bag(model), seed=first_seed + number,
        )
        for number in range(count)
    ]  # fmt: skip
    return [check_request(package.card(), one.tensors, request_id=str(number)) for number, one in enumerate(made)]


@dataclass(frozen=True, slots=True)
class Asked:
    """A ranker, and the event loop on which it is called."""

    runner: asyncio.Runner
    ranker: Ranker


@contextmanager
def asked(open_ranker: Callable[[], Ranker]) -> Iterator[Asked]:
    """Open a ranker on its own event loop, which runs only while the ranker is called; close it at the end."""

    async def opened() -> Ranker:
        return open_ranker()

    with asyncio.Runner() as runner:
        ranker = runner.run(opened())
        try:
            yield Asked(runner, ranker)
        finally:
            runner.run(ranker.close(drain_s=1.0))


async def closed_loop_per_s(ranker: Ranker, requests: Sequence[RankRequest], *, callers: int, seconds: float) -> float:
    """Measure the throughput of some callers in a closed loop, without deadlines, in requests per second."""
    until_s = time.monotonic() + seconds
    done = 0

    async def call(number: int) -> None:
        nonlocal done
        while time.monotonic() < until_s:
            await ranker.rank(requests[number % len(requests)])
            number += 1
            done += 1

    await asyncio.gather(*(call(number * 3) for number in range(callers)))
    return done / seconds


async def arrivals(rate_per_s: float, seconds: float, chance: random.Random) -> AsyncIterator[float]:
    """Yield the times (of `time.monotonic`) of a Poisson process, each when it has come."""
    begin_s, due_s = time.monotonic(), 0.0
    while (due_s := due_s + chance.expovariate(rate_per_s)) < seconds:
        await asyncio.sleep(max(0.0, begin_s + due_s - time.monotonic()))
        yield begin_s + due_s


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect garbage, then pause Python's collector inside the block: thousands of answers are kept for comparison,
    and scanning them takes a tenth of a second, which would be charged to the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def wait_until_ready(core: Core, *, limit_s: float = 60.0) -> None:
    """Wait until the core is ready. Raises `SystemFailed` if that takes longer than `limit_s`."""
    until_s = time.monotonic() + limit_s
    while (missing := core.ready()) is not None:
        if time.monotonic() > until_s:
            raise SystemFailed(f"not ready: {missing}")
        time.sleep(_LOOK_S)
