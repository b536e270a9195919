"""The ingress's own listener, beside Serve's proxy, which accounts for most of the time of a small request.

Unlike the proxy, it does not hold requests while the ingress's replica restarts (connections are refused meanwhile),
and it does not find the replica on any machine (it listens on the machine of the replica).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from plait_serving.deployments.prompt_protocol import PromptHttpProtocol

_log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
"""Idle connections are kept about as long as clients' pools and load balancers keep theirs (60 s is common)."""


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to whoever runs the process. uvicorn itself restores the handlers that it
    found: when two servers overlap, as an old and a new listener do, the first one to end would stay installed as
    the handler of the process's Ctrl-C."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


class DirectListener:
    """A listener that holds its port from the constructor on and answers while `answering` is entered."""

    def __init__(self, *, host: str, port: int, drain_s: float) -> None:
        """Bind the port. Raises `OSError`, which names the address, if it cannot be bound. `drain_s`: how long shutdown
        waits for answers in flight."""
        self._host, self._port, self._drain_s = host, port, drain_s
        self._socket = _listen(host, port)
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def failure(self) -> str | None:
        """Why it no longer answers although it should; None if it does."""
        if self._server is None or self._server.should_exit or self._task is None or not self._task.done():
            return None
        return f"the listener on port {self._port} ended: {self._task.exception()!r}"

    @asynccontextmanager
    async def answering(self, app: ASGIApp) -> AsyncIterator[None]:
        """Serve the application here without running its lifespan; on exit, do what `refuse_new` does."""
        config = uvicorn.Config(
            app,
            http=PromptHttpProtocol,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(self._drain_s)),
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        _log.info("answering on %s:%d too", self._host, self._socket.getsockname()[1])
        try:
            yield
        finally:
            self.refuse_new()
            await asyncio.wait([self._task])

    def refuse_new(self) -> None:
        """Stop accepting connections within a tenth of a second and keep none alive; answer requests in flight."""
        if self._server is not None:
            self._server.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    """Open the socket with SO_REUSEPORT: when Serve replaces the replica, the old and the new one both listen for a
    while."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"server.direct_port: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
