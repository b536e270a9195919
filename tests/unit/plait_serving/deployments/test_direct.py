"""The ingress's own listener, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
import uvicorn
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from plait.config import ServerSection
from plait.errors import ServeError
from plait.server.ports import check_port, free_port, hold_port, with_port
from plait_serving.deployments.direct import DirectListener
from support.waiting import until


class App:
    """Answers with what it is called, when it may."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        self.asked.set()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.name.encode()})


@asynccontextmanager
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(trust_env=False) as made:
        yield made


async def _ask(asking: httpx2.AsyncClient, port: int) -> str:
    return (await asking.get(f"http://127.0.0.1:{port}/")).text


async def _refused(asking: httpx2.AsyncClient, port: int) -> None:
    """Waits until nobody listens there."""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionRefusedError):
            while True:
                socket.create_connection(("127.0.0.1", port)).close()
                await asyncio.sleep(0.02)
    with pytest.raises(httpx2.ConnectError):
        await _ask(asking, port)


async def test_what_runs_is_answered_and_what_comes_later_refused() -> None:
    """`refuse_new` closes the door; the answer in flight is sent."""
    port, app = free_port("127.0.0.1"), App("a")
    app.may_answer.clear()
    listener = DirectListener(host="127.0.0.1", port=port, drain_s=20)
    async with client() as asking, listener.answering(app):
        running = asyncio.create_task(_ask(asking, port))
        await app.asked.wait()
        listener.refuse_new()
        await _refused(asking, port)
        app.may_answer.set()
        assert await running == "a"
        assert listener.failure is None


async def test_an_answer_that_never_comes_does_not_hold_the_end() -> None:
    """After ``drain_s`` the request is dropped, and its client told so."""
    port, app = free_port("127.0.0.1"), App("a")
    app.may_answer.clear()
    async with client() as asking:
        async with DirectListener(host="127.0.0.1", port=port, drain_s=0.1).answering(app):
            running = asyncio.create_task(_ask(asking, port))
            await app.asked.wait()
        assert (await running) == "Internal Server Error"


async def test_the_next_replica_takes_over_without_a_gap() -> None:
    """Old and new listen together while Serve replaces one by the other. Signals stay the process's own."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    port = free_port("127.0.0.1")
    where = {"host": "127.0.0.1", "port": port, "drain_s": 1}
    async with client() as asking:
        async with contextlib.AsyncExitStack() as old:
            await old.enter_async_context(DirectListener(**where).answering(App("old")))
            assert await _ask(asking, port) == "old"
            async with DirectListener(**where).answering(App("new")):
                await old.aclose()
                assert {await _ask(asking, port) for _ in range(5)} == {"new"}
                assert signal.getsignal(signal.SIGINT) is on_ctrl_c
    assert signal.getsignal(signal.SIGINT) is on_ctrl_c


async def test_a_listener_that_ended_by_itself_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica's health check passes it on."""

    async def serve(*_: object, **__: object) -> None:
        raise OSError("the socket is gone")

    monkeypatch.setattr(uvicorn.Server, "serve", serve)
    port = free_port("127.0.0.1")
    listener = DirectListener(host="127.0.0.1", port=port, drain_s=1)
    async with listener.answering(App("a")):
        await until(lambda: listener.failure is not None)
        assert f"port {port}" in str(listener.failure)
        assert "the socket is gone" in str(listener.failure)


def test_a_port_of_another_program_is_named() -> None:
    """By the replica, and before anything is started by the command."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"server\.direct_port: cannot listen on 127\.0\.0\.1:{port}: "):
            DirectListener(host="127.0.0.1", port=port, drain_s=1)
        with pytest.raises(Exception, match=r"in use by another program; choose another with server\.direct_port"):
            check_port("127.0.0.1", port, option="server.direct_port")
        with pytest.raises(ServeError, match=r"in use by another program; choose another with server\.direct_port"):
            hold_port("127.0.0.1", port)


async def test_a_port_that_is_held_is_for_the_ingress_alone() -> None:
    """Who asks for a free port does not get it, other programs are refused, and nobody is answered by the holder."""
    with hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError):
            socket.create_server(("127.0.0.1", port))
        async with client() as asking:
            with pytest.raises(httpx2.ConnectError):
                await _ask(asking, port)
            async with DirectListener(host="127.0.0.1", port=port, drain_s=1).answering(App("a")):
                assert {await _ask(asking, port) for _ in range(5)} == {"a"}
    socket.create_server(("127.0.0.1", port)).close()


def test_the_two_ports_differ() -> None:
    """One of them is the proxy's."""
    with pytest.raises(ValidationError, match=r"direct_port is port \(8000\), where Serve's proxy listens"):
        ServerSection(direct_port=8000)
    assert ServerSection(direct_port=8001).direct_port == 8001


@pytest.mark.parametrize("url", ["http://127.0.0.1:80", "http://[::1]:80"])
def test_another_port_of_the_same_host(url: str) -> None:
    """IPv6 too."""
    assert with_port(url, 81) == url[:-2] + "81"
