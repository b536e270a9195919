"""Threads for work off the event loop: whose turn it is, and when one is free."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress

import pytest

from plait_serving.http.context import TurnThreads
from support.http_app import until


class Gate:
    """Work that begins, and ends when it is let go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.go.wait(60)
        return "done"


async def test_work_is_done_elsewhere_and_its_outcome_comes_back() -> None:
    """The result or the error."""
    threads = TurnThreads(1, "t")
    assert await threads.run("a", threading.get_ident) != threading.get_ident()
    with pytest.raises(KeyError, match="x"):
        await threads.run("a", lambda: {}["x"])


async def test_a_thread_belongs_to_its_work_until_that_ends() -> None:
    """A client that leaves frees nothing; who left before his work began costs nothing."""
    threads, gate, ran = TurnThreads(1, "t"), Gate(), []
    first = asyncio.create_task(threads.run("a", gate))
    await until(gate.began.is_set)
    first.cancel()
    waiting = [asyncio.create_task(threads.run("a", lambda i=i: ran.append(i))) for i in range(20)]
    await asyncio.sleep(0)
    for task in waiting[:-1]:
        task.cancel()
    await asyncio.gather(first, *waiting[:-1], return_exceptions=True)
    assert ran == []
    assert len(threads._work) == 2  # what left holds no body any more
    gate.go.set()
    await waiting[-1]
    assert ran == [19]
    await until(lambda: not threads._work and not threads._waiting)


async def test_tenants_have_their_turns() -> None:
    """However much one of them brings."""
    threads, gate, ran = TurnThreads(1, "t"), Gate(), []
    tasks = [asyncio.create_task(threads.run("flood", gate))]
    await until(gate.began.is_set)
    for tenant, count in (("flood", 6), ("one", 1), ("two", 2)):
        tasks += [asyncio.create_task(threads.run(tenant, lambda t=tenant: ran.append(t))) for _ in range(count)]
    await asyncio.sleep(0)
    gate.go.set()
    await asyncio.gather(*tasks)
    assert ran == ["flood", "one", "two", "flood", "two", "flood", "flood", "flood", "flood"]


async def test_an_error_does_not_keep_what_it_is_about() -> None:
    """Its frames hold the work, and with it a body: when it is done with, they go without a collection."""

    class Body:
        pass

    async def fail(threads: TurnThreads) -> weakref.ref[Body]:
        body = Body()

        def work(body: Body = body) -> None:
            raise ValueError(body)

        with suppress(ValueError):
            await threads.run("a", work)
        return weakref.ref(body)

    gc.collect()
    gc.disable()
    try:
        kept = await fail(TurnThreads(1, "t"))
        await until(lambda: kept() is None)
    finally:
        gc.enable()
