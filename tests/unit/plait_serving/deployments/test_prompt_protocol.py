"""Connections whose request does not arrive: closed, by our own listener and by what Serve's proxy runs of ours."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import chain, cycle
from typing import Any

import pytest
import uvicorn
from ray.serve._private import proxy as ray_proxy
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from plait.server.ports import free_port
from plait_serving.deployments import proxy
from plait_serving.deployments.direct import Direct, DirectListener
from plait_serving.deployments.prompt_protocol import PromptHttpProtocol
from plait_serving.deployments.proxy import AnsweringMiddleware
from plait_serving.deployments.proxy_bodies import GatheringMiddleware, PacedQueue
from plait_serving.http.edge.repeating import RepeatMiddleware
from support.http_app import until

WAIT_S = 30.0
IN_EVERY_PROXY = [AnsweringMiddleware, GatheringMiddleware, RepeatMiddleware]
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body; the path /slow takes its time."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(0.6)
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are too long for a test."""
    monkeypatch.setattr(PromptHttpProtocol, "head_s", 0.3)
    monkeypatch.setattr(PromptHttpProtocol, "body_s", 0.3)


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    port = free_port("127.0.0.1")
    listener = DirectListener(Direct(host="127.0.0.1", port=port, drain_s=1))
    async with listener.answering(echo):
        await until(lambda: listener._server is not None and listener._server.started)
        yield port


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server ends the connection, with no other word than that a body was too slow."""
    async with asyncio.timeout(WAIT_S):
        try:
            words = await reader.read()
            return words == b"" or words.startswith(b"HTTP/1.1 408 ")
        except ConnectionResetError:
            return True


async def answered(reader: asyncio.StreamReader, body: bytes) -> bool:
    """Whether a 200 with that body comes."""
    async with asyncio.timeout(WAIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        return head.startswith(b"HTTP/1.1 200") and await reader.readexactly(len(body)) == body


@pytest.mark.parametrize("sent", [b"", b"G", b"\r\n\r\n", HEAD, HEAD + b"\r\nabc"], ids=repr)
async def test_a_request_that_does_not_arrive_loses_its_connection(sent: bytes, impatient: None) -> None:
    """Finding 12: of a hundred such connections none was ever closed."""
    async with listening() as port:
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        for _, writer in pairs:
            writer.write(sent)
        assert all(await asyncio.gather(*(is_closed(reader) for reader, _ in pairs)))


@pytest.mark.parametrize(("start", "more"), [(b"GET / HTTP/1.1\r\nx: ", b"a"), (b"", b"\r\n")])
async def test_dribbling_does_not_help(start: bytes, more: bytes, impatient: None) -> None:
    """The time counts from the first byte, on a connection that has been answered before too (finding 12)."""
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\nabcdef")
        assert await answered(reader, b"abcdef")
        closed = asyncio.create_task(is_closed(reader))
        for byte in chain(start, cycle(more)):
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
            if closed.done():
                break
        assert await closed


async def test_a_head_without_an_end_is_not_kept(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it comes (finding 12)."""
    monkeypatch.setattr(PromptHttpProtocol, "head_s", WAIT_S)
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"x: y\r\n" * 20_000)
        assert await is_closed(reader)


async def test_who_is_slow_but_not_silent_is_served(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body at more than a trickle takes as long as it takes, and so does an answer."""
    monkeypatch.setattr("plait_serving.deployments.prompt_protocol._MIN_BODY_BYTES", 1)
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD.replace(b" / ", b" /slow ") + b"\r\n")
        for byte in (b"a", b"b", b"c", b"d", b"e", b"f"):
            await asyncio.sleep(0.1)
            writer.write(byte)
        assert await answered(reader, b"abcdef")
        writer.write(HEAD + b"\r\nuvwxyz")
        assert await answered(reader, b"uvwxyz")
        writer.close()


async def test_the_start_of_a_next_request_does_not_cost_the_answer_to_the_first(impatient: None) -> None:
    """A client may send ahead; that connection is closed when it owes the only thing left."""
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD.replace(b" / ", b" /slow ") + b"\r\nabcdef")
        await asyncio.sleep(0.05)
        writer.write(b"POST / HT")
        assert await answered(reader, b"abcdef")
        assert await is_closed(reader)


class HeldLoop:
    """Timers on a clock that the test moves; tasks are the running loop's."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers: list[tuple[float, asyncio.TimerHandle]] = []

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self._now_s + delay_s, call, (), asyncio.get_running_loop())
        self._timers.append((self._now_s + delay_s, timer))
        return timer

    async def pass_time(self, seconds: float) -> None:
        self._now_s += seconds
        due = [timer for at_s, timer in self._timers if at_s <= self._now_s]
        self._timers = [each for each in self._timers if each[0] > self._now_s]
        for timer in due:
            if not timer.cancelled():
                timer._run()
        await settled()


async def settled() -> None:
    """Tasks have done what they can."""
    for _ in range(10):
        await asyncio.sleep(0)


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


async def test_a_body_that_drips_is_a_408_and_its_connection_closes() -> None:
    """Of 600 that came a byte a second every one stayed; each is told why, and the application that nobody is there."""
    loop, ended = HeldLoop(), []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        ended.append(scope["path"])

    pairs = [connected(loop, noting) for _ in range(600)]
    for protocol, _ in pairs:
        protocol.data_received(post(1000).replace(b"host: x", b"host: x\r\nx-request-id: mine"))
    for _ in range(10):
        for protocol, wire in pairs:
            if not wire.closed:
                protocol.data_received(b"x")
        await loop.pass_time(1.0)
    assert all(wire.closed for _, wire in pairs)
    head, _, body = pairs[0][1].written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    told = {b"content-type: application/json", b"connection: close", b"x-request-id: mine"}
    assert told < set(head.split(b"\r\n"))
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("timeout_error", "body_too_slow", None)
    assert len(ended) == 600


async def test_below_v2_it_is_said_as_the_protocol_there_has_it() -> None:
    """A message, and nothing else."""
    loop = HeldLoop()
    protocol, wire = connected(loop)
    protocol.data_received(post(1000, "/v2/models/picks/infer"))
    await loop.pass_time(10.0)
    assert wire.written.startswith(b"HTTP/1.1 408 ")
    assert list(json.loads(wire.written.partition(b"\r\n\r\n")[2])) == ["error"]


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


async def test_who_was_quick_may_pause() -> None:
    """The rate is that of the whole body so far."""
    loop = HeldLoop()
    protocol, wire = connected(loop)
    protocol.data_received(post(200_001))
    await settled()
    protocol.data_received(bytes(200_000))
    for _ in range(9):
        await loop.pass_time(10.0)
        assert not wire.closed
    protocol.data_received(b"x")
    await settled()
    assert wire.written.startswith(b"HTTP/1.1 200 ")


async def test_time_in_which_nobody_reads_does_not_count() -> None:
    """Then the server is the slow one."""
    loop, go = HeldLoop(), asyncio.Event()

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await echo(scope, receive, send)

    protocol, wire = connected(loop, late)
    protocol.data_received(post(100_001) + bytes(100_000))
    asking, other = connected(loop, late)
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
