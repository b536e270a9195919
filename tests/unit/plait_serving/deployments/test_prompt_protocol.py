"""Connections whose request does not arrive: closed, by our own listener and by what Serve's proxy runs of ours."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine
from itertools import chain, cycle, islice
from typing import Any

import pytest
import uvicorn
from ray.serve._private import proxy as ray_proxy
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from plait_serving.deployments import proxy
from plait_serving.deployments.prompt_protocol import PromptHttpProtocol
from plait_serving.deployments.proxy import AnsweringMiddleware
from plait_serving.deployments.proxy_bodies import GatheringMiddleware, PacedQueue
from plait_serving.http.edge.refusals import RepeatMiddleware
from support.waiting import settled

IN_EVERY_PROXY = [AnsweringMiddleware, GatheringMiddleware, RepeatMiddleware]
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Timer:
    """What `call_later` returns."""

    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s, self.call = at_s, call

    def cancel(self) -> None:
        self.call = lambda: None


class HeldLoop:
    """Timers on a clock that the test moves; tasks are the running loop's."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers: list[Timer] = []

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self._timers.append(Timer(self._now_s + delay_s, call))
        return self._timers[-1]

    async def pass_time(self, seconds: float) -> None:
        self._now_s += seconds
        due = [timer for timer in self._timers if timer.at_s <= self._now_s]
        self._timers = [timer for timer in self._timers if timer.at_s > self._now_s]
        for timer in due:
            timer.call()
        await settled()


class Wire(asyncio.Transport):
    """A connection as the server sees it: what it wrote, and whether it reads and has closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = self.paused = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def connected(loop: HeldLoop, app: ASGIApp = echo) -> tuple[PromptHttpProtocol, Wire]:
    config = uvicorn.Config(app, http=PromptHttpProtocol, lifespan="off", log_config=None)
    config.load()
    protocol, wire = PromptHttpProtocol(config, ServerState(), {}, loop), Wire()  # type: ignore[arg-type]
    protocol.connection_made(wire)
    return protocol, wire


def post(length: int, path: str = "/v1/images/edits") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", HEAD, HEAD + b"\r\nabc"], ids=repr)
async def test_a_request_that_does_not_arrive_loses_its_connection(sent: bytes) -> None:
    """Finding 12: of a hundred such connections none was ever closed. No other word is said than that a body was too
    slow."""
    loop = HeldLoop()
    protocol, wire = connected(loop)
    protocol.data_received(sent)
    await loop.pass_time(9.0)
    assert not wire.closed
    await loop.pass_time(1.0)
    assert wire.closed
    assert wire.written.startswith(b"HTTP/1.1 408 ") if b"\r\n\r\nabc" in sent else not wire.written


@pytest.mark.parametrize(("start", "more"), [(b"GET / HTTP/1.1\r\nx: ", b"a"), (b"", b"\r\n")])
async def test_dribbling_does_not_help(start: bytes, more: bytes) -> None:
    """The time counts from the first byte, on a connection that has been answered before too (finding 12)."""
    loop = HeldLoop()
    protocol, wire = connected(loop)
    protocol.data_received(HEAD + b"\r\nabcdef")
    await settled()
    assert wire.written.endswith(b"abcdef")
    for byte in islice(chain(start, cycle(more)), 10):
        assert not wire.closed
        protocol.data_received(bytes([byte]))
        await loop.pass_time(1.0)
    assert wire.closed


async def test_a_head_without_an_end_is_not_kept() -> None:
    """However fast it comes (finding 12)."""
    protocol, wire = connected(HeldLoop())
    protocol.data_received(HEAD + b"x: y\r\n" * 20_000)
    assert wire.closed


def held_back(go: asyncio.Event) -> ASGIApp:
    """Answers with the body, once it may."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await echo(scope, receive, send)

    return app


async def test_who_is_slow_but_not_silent_is_served() -> None:
    """A body at more than a trickle takes minutes, and so does an answer; who was quick may pause, as the rate is that
    of the whole body so far."""
    loop, go = HeldLoop(), asyncio.Event()

    async def pondering(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_later(message: Message) -> None:
            await go.wait()
            await send(message)

        await echo(scope, receive, send_later)

    protocol, wire = connected(loop, pondering)
    protocol.data_received(post((30 << 14) + 1))
    for _ in range(8):
        protocol.data_received(bytes(60 << 10))
        await loop.pass_time(10.0)
    for _ in range(8):
        await loop.pass_time(10.0)
        assert not wire.closed
    protocol.data_received(b"x")
    await loop.pass_time(3_600.0)
    assert not wire.closed
    go.set()
    await settled()
    assert wire.written.startswith(b"HTTP/1.1 200 ")
    protocol.data_received(HEAD + b"\r\nuvwxyz")
    await settled()
    assert wire.written.endswith(b"uvwxyz")


async def test_the_start_of_a_next_request_does_not_cost_the_answer_to_the_first() -> None:
    """A client may send ahead; that connection is closed when it owes the only thing left."""
    loop, go = HeldLoop(), asyncio.Event()
    protocol, wire = connected(loop, held_back(go))
    protocol.data_received(HEAD + b"\r\nabcdef" + b"POST / HT")
    await loop.pass_time(10.0)
    assert not wire.closed
    go.set()
    await settled()
    assert wire.written.endswith(b"abcdef")
    await loop.pass_time(10.0)
    assert wire.closed


@pytest.mark.parametrize("path", ["/v1/images/edits", "/v2/models/picks/infer"])
async def test_a_body_that_drips_is_a_408_and_its_connection_closes(path: str) -> None:
    """Of 600 that came a byte a second every one stayed. Each is told why, in the form of its part of the API, and the
    application that nobody is there."""
    loop, ended = HeldLoop(), []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        ended.append(scope["path"])

    protocol, wire = connected(loop, noting)
    protocol.data_received(post(1000, path).replace(b"host: x", b"host: x\r\nx-request-id: mine"))
    for _ in range(10):
        assert not wire.closed
        protocol.data_received(b"x")
        await loop.pass_time(1.0)
    assert wire.closed
    head, _, body = wire.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    told = {b"content-type: application/json", b"connection: close", b"x-request-id: mine"}
    assert told < set(head.split(b"\r\n"))
    error = json.loads(body)["error"]
    assert isinstance(error, str) if path.startswith("/v2") else error["code"] == "body_too_slow"
    assert ended == [path]


async def test_a_body_has_a_deadline() -> None:
    """At a rate that is just enough it would take hours."""
    loop = HeldLoop()
    protocol, wire = connected(loop)
    protocol.data_received(post(64 << 20))
    seconds = 0
    while not wire.closed:
        protocol.data_received(bytes(4 << 10))
        await loop.pass_time(1.0)
        seconds += 1
        assert seconds <= 600
    assert seconds > 60
    assert wire.written.startswith(b"HTTP/1.1 408 ")


async def test_time_in_which_nobody_reads_does_not_count() -> None:
    """Then the server is the slow one."""
    loop, go = HeldLoop(), asyncio.Event()

    protocol, wire = connected(loop, held_back(go))
    protocol.data_received(post(100_001) + bytes(100_000))
    asking, other = connected(loop, held_back(go))
    asking.data_received(post(1).replace(b"host: x", b"host: x\r\nexpect: 100-continue"))
    assert wire.paused
    for _ in range(100):
        await loop.pass_time(10.0)
    assert not wire.closed
    assert not other.closed
    go.set()
    await settled()
    assert not wire.paused
    assert other.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    for each in (protocol, asking):
        each.data_received(b"x")
    await settled()
    assert wire.written.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 200 " in other.written


async def test_an_answer_that_was_given_stands() -> None:
    """A body that goes on dripping after it only loses its connection."""
    loop = HeldLoop()

    async def hasty(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    protocol, wire = connected(loop, hasty)
    protocol.data_received(post(1000))
    await settled()
    await loop.pass_time(10.0)
    assert wire.closed
    assert wire.written.count(b"HTTP/1.1 ") == wire.written.count(b"HTTP/1.1 401 ") == 1


def test_the_proxy_gets_the_same_patience_and_the_servers_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Serve calls by its name, in the environment that a Ray of ours is started with."""
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    environment = proxy.proxy_environment(("127.0.0.1", "[::1]"))
    assert environment[proxy.CALLBACK_VARIABLE] == "plait_serving.deployments.proxy.configure_proxy"
    monkeypatch.setenv(proxy.HOSTS_VARIABLE, environment[proxy.HOSTS_VARIABLE])
    monkeypatch.setattr(ray_proxy, "MessageQueue", ray_proxy.MessageQueue)
    hosts, *others = proxy.configure_proxy()
    assert hosts.kwargs == {"hosts": ("127.0.0.1", "[::1]")}
    assert [each.cls for each in others] == IN_EVERY_PROXY
    assert ray_proxy.MessageQueue is PacedQueue
    makes_queues = inspect.unwrap(ray_proxy.HTTPProxy.send_request_to_replica)
    assert "MessageQueue" in makes_queues.__code__.co_names
    config = uvicorn.Config(echo)
    config.load()
    assert config.http_protocol_class is PromptHttpProtocol
    monkeypatch.setenv(proxy.HOSTS_VARIABLE, "")
    assert [each.cls for each in proxy.configure_proxy()] == IN_EVERY_PROXY
