"""The server that does nothing, as fast as Python can: a raw asyncio protocol over uvloop, one process.

It prints its port. It answers every line on its standard input with the number of
requests served so far, and ends with that input.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

_BODY = b'{"ok":true}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
RESPONSE = _HEAD % len(_BODY) + _BODY
_BLANK_LINE = b"\r\n\r\n"


class NoopProtocol(asyncio.Protocol):
    """Answers every complete request head; requests have no body, and may arrive in pieces or several at once."""

    served = 0  # by all connections

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by name

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol."""
        assert self._transport is not None
        if self._rest:
            data = self._rest + data
        requests = data.count(_BLANK_LINE)
        self._rest = b"" if data.endswith(_BLANK_LINE) else data[data.rfind(_BLANK_LINE) + 4 :] if requests else data
        if requests:
            NoopProtocol.served += requests
            self._transport.write(RESPONSE * requests)


def _tell() -> None:
    for _ in sys.stdin:
        print(NoopProtocol.served, flush=True)


async def _serve() -> None:
    """Serve on a free port, print the port, and print the number of requests after a line on stdin."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(NoopProtocol, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, _tell)
    server.close()


def serve() -> None:
    """Run the server, until standard input ends."""
    uvloop.run(_serve())
