"""Connections whose request does not arrive: closed, by our own listener and by what Serve's proxy runs of ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain, cycle

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from plait.server.ports import free_port
from plait_serving.deployments import proxy
from plait_serving.deployments.direct import Direct, DirectListener
from plait_serving.deployments.prompt_protocol import PromptHttpProtocol
from plait_serving.http.edge.repeating import RepeatMiddleware
from support.http_app import until

WAIT_S = 30.0
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
    """Whether the server ends the connection without another word."""
    async with asyncio.timeout(WAIT_S):
        try:
            return await reader.read() == b""
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


def test_the_proxy_gets_the_same_patience_and_the_servers_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Serve calls by its name, in the environment that a Ray of ours is started with."""
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    environment = proxy.proxy_environment(("127.0.0.1", "[::1]"))
    assert environment[proxy.CALLBACK_VARIABLE] == "plait_serving.deployments.proxy.configure_proxy"
    monkeypatch.setenv(proxy.HOSTS_VARIABLE, environment[proxy.HOSTS_VARIABLE])
    hosts, repeats = proxy.configure_proxy()
    assert hosts.kwargs == {"hosts": ("127.0.0.1", "[::1]")}
    assert repeats.cls is RepeatMiddleware
    config = uvicorn.Config(echo)
    config.load()
    assert config.http_protocol_class is PromptHttpProtocol
    monkeypatch.setenv(proxy.HOSTS_VARIABLE, "")
    assert [each.cls for each in proxy.configure_proxy()] == [RepeatMiddleware]
