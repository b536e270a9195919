"""Threads for work off the event loop: whose turn it is, and when one is free."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest

from plait_serving.http.edge import turn_threads
from plait_serving.http.edge.turn_threads import TurnThreads
from support.waiting import until


class Gate:
    """Work that begins, and ends when it is let go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.go.wait(60)
        return "done"


async def test_a_thread_belongs_to_its_work_until_that_ends() -> None:
    """A client that leaves frees nothing; who left before his work began costs nothing, and holds no body any more."""
    threads, gate, ran, held = TurnThreads(1, "t"), Gate(), [], weakref.WeakSet()
    first = asyncio.create_task(threads.run("a", gate))
    await until(gate.began.is_set)
    first.cancel()
    *leaving, last = [asyncio.create_task(threads.run("a", work(ran, number, held))) for number in range(20)]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.gather(first, *leaving, return_exceptions=True)
    assert ran == []
    del leaving, task
    await until(lambda: gc.collect() >= 0 and len(held) == 1)
    gate.go.set()
    await last
    assert ran == [19]
    await until(lambda: not held)


class Body:
    """What a request holds."""


def work(ran: list[int], number: int, held: weakref.WeakSet[Body]) -> Callable[[], None]:
    """What notes its number, and a body that it holds."""
    body = Body()
    held.add(body)
    return lambda body=body: ran.append(number)


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


@pytest.mark.parametrize("rests", [False, True])
async def test_a_thread_rests_as_long_as_it_worked(monkeypatch: pytest.MonkeyPatch, rests: bool) -> None:
    """So that the event loop has every other moment, however much there is to read."""
    now, slept = [100.0], []

    def slow() -> None:
        now[0] += 0.25

    monkeypatch.setattr(turn_threads, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    threads = TurnThreads(1, "t", rests=rests)
    for _ in range(2):
        await threads.run("a", slow)
    await threads.run("a", lambda: None)
    assert slept[:2] == [0.25, 0.25][: 2 * rests]
