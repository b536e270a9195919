"""Bodies reach Serve whole or in large pieces, and wait in the sender's connection while nobody takes them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.responses import PlainTextResponse

from plait_serving.deployments import proxy_bodies
from plait_serving.deployments.proxy_bodies import GatheringMiddleware, PacedQueue
from support.waiting import settled

PIECE = 64 << 10
AHEAD = 1 << 20
LEFT = {"type": "http.disconnect"}


def body(data: bytes = b"", *, more: bool = True) -> dict:
    return {"type": "http.request", "body": data, "more_body": more}


def scope_of(**headers: str) -> dict:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": "/", "headers": pairs}


class Sender:
    """A client whose messages come when the test says so."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[dict] = asyncio.Queue()

    async def receive(self) -> dict:
        return await self.queue.get()

    def send(self, *messages: dict) -> None:
        for message in messages:
            self.queue.put_nowait(message)


class Behind:
    """What the proxy does: it notes each message that it gets, until the last one."""

    def __init__(self) -> None:
        self.got: list[dict] = []
        self.calls = 0

    async def __call__(self, scope, receive, send):
        self.calls += 1
        while True:
            self.got.append(await receive())
            if not self.got[-1].get("more_body", False):
                break
        await PlainTextResponse("ok")(scope, receive, send)


async def nothing(message: dict) -> None:
    """Sent to nobody."""


@pytest.fixture
def behind() -> Behind:
    return Behind()


def passed_on(behind: Behind, sender: Sender, **headers: str) -> asyncio.Task[None]:
    return asyncio.create_task(GatheringMiddleware(behind)(scope_of(**headers), sender.receive, nothing))


async def test_a_body_that_drips_is_one_message_once_it_is_whole(behind):
    """Until then it costs Serve nothing."""
    sender = Sender()
    task = passed_on(behind, sender, content_length="1000")
    for _ in range(999):
        sender.send(body(b"x"))
    await settled()
    assert behind.calls == 0
    sender.send(body(b"y", more=False))
    await task
    assert behind.got == [body(b"x" * 999 + b"y", more=False)]


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        ([body(more=False)], [body(more=False)]),  # as each GET
        ([body(b"x"), LEFT], []),  # Serve is not told of a request that came in part
        ([body(b"x" * PIECE), body(b"y"), LEFT], [body(b"x" * PIECE), LEFT]),  # what came of the piece is of no use
    ],
)
async def test_who_leaves_before_the_end_is_told_as_far_as_serve_was_asked(behind, sent, got):
    """A request without a body goes on at once."""
    sender = Sender()
    sender.send(*sent)
    await passed_on(behind, sender)
    assert behind.got == got


async def test_one_that_declares_much_goes_on_at_once(behind):
    """It may be refused for its length alone; what comes of it comes in large pieces."""
    sender = Sender()
    task = passed_on(behind, sender, content_length=str(PIECE + 1))
    await settled()
    assert behind.calls == 1
    for _ in range(64):
        sender.send(body(b"x" * 1024))
    sender.send(body(b"y", more=False))
    await task
    assert behind.got == [body(b"x" * PIECE), body(b"y", more=False)]


async def test_a_queue_that_is_full_makes_its_sender_wait():
    """At most 1 MiB and a piece wait for the ingress, however long the body is."""
    queue = PacedQueue()

    async def fill() -> None:
        for _ in range(100):
            await queue(body(b"x" * PIECE))
        await queue(LEFT)

    task = asyncio.create_task(fill())
    fetched: list[dict] = []
    while LEFT not in fetched:
        await settled()
        await queue.wait_for_message()
        messages = queue.get_messages_nowait()
        assert sum(len(each.get("body", b"")) for each in messages) <= AHEAD
        fetched += messages
    await task
    assert [len(each.get("body", b"")) for each in fetched] == [PIECE] * 100 + [0]
    queue.close()
    await queue.wait_for_message()
    assert queue.get_messages_nowait() == []


async def test_large_bodies_go_on_at_a_pace_all_together(monkeypatch):
    """A quarter of a core is enough for them, however many come at once."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(proxy_bodies, "asyncio", SimpleNamespace(
        Event=asyncio.Event, sleep=sleep, get_running_loop=lambda: SimpleNamespace(time=lambda: 100.0)))  # fmt: skip
    monkeypatch.setattr(PacedQueue, "next_at_s", 0.0)
    queues = [PacedQueue() for _ in range(4)]
    for queue in queues:
        task = asyncio.create_task(queue(body(b"x" * AHEAD)))
        await settled()
        queue.get_messages_nowait()
        await task
    assert slept == pytest.approx([number / 32 for number in (1, 2, 3, 4)])
