"""A single-process benchmark server: prints its free port on standard output, ends with its standard input."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import uvicorn

from plait_bench.disagg.load.bodies import HEADER_BYTES
from plait_bench.errors import SystemFailed

_START_S = 180.0
"""The time limit for starting: a model of a gigabyte is built or mapped, and warmed up."""


def announce(app: Any) -> None:
    """Serve an ASGI application until standard input ends; print the port first."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, loop="uvloop"))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ended = loop.run_in_executor(None, sys.stdin.read)
        ended.add_done_callback(lambda _: setattr(server, "should_exit", True))
        print(sock.getsockname()[1], flush=True)
        await server.serve(sockets=[sock])

    import uvloop

    uvloop.run(run())


def free_port() -> int:
    """Return a loopback port that is free now and outside of the ephemeral range: the server that needs it listens only
    seconds later."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), k=50):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise SystemFailed("no port between 20,000 and 32,767 is free")


_END_S = 60.0

HEADERS = {"inference-header-content-length": str(HEADER_BYTES), "content-type": "application/octet-stream"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServer:
    """A server process that has answered a request."""

    url: str
    pid: int
    client: httpx2.Client

    def ask(self, body: bytes) -> httpx2.Response:
        """Send an infer request. Raises `SystemFailed` unless the response is 200."""
        answer = self.client.post(f"{self.url}/v2/models/model/infer", content=body, headers=HEADERS, timeout=_START_S)
        if answer.status_code != 200:
            raise SystemFailed(f"{self.url} answered {answer.status_code}: {answer.text[:300]}")
        return answer


@contextmanager
def serving(
    arguments: Sequence[str], body: bytes, *, environ: Mapping[str, str] | None = None, has_children: bool = False
) -> Iterator[BenchServer]:
    """Start a server process, which prints its port or its address, and yield it once it has answered `body`. Raises
    `SystemFailed`.

    `has_children`: it is stopped by SIGTERM, so that it ends its own processes too.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise SystemFailed(f"{' '.join(arguments)} did not start")
        with httpx2.Client() as client:
            url = f"http://127.0.0.1:{line}" if line.isdigit() else line
            server = BenchServer(url=url, pid=process.pid, client=client)
            _wait(server, body)
            yield server
    finally:
        if has_children:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        process.kill()
        process.wait()


def _wait(server: BenchServer, body: bytes) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            server.ask(body)
        except httpx2.TransportError as error:
            if time.monotonic() > deadline_s:
                raise SystemFailed(f"{server.url} does not answer: {error}") from error
            time.sleep(0.05)
        else:
            return
