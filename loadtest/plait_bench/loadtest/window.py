"""One way to measure all load generators: what the server counted, and what the generator's processes used meanwhile.

No generator's own figures are trusted: requests are those that the server served in the window, CPU time is that of
the generator's whole process tree.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast

import psutil
import uvloop

from plait_bench.benchmark import said, started
from plait_bench.errors import SystemFailed

_START_S = 60.0
_BODY = b'{"ok":true}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_RESPONSE = _HEAD % len(_BODY) + _BODY
_BLANK_LINE = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputWindow:
    """`requests` served in `seconds`, with `cpu_s` of the generator's CPU time."""

    requests: int
    seconds: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    @property
    def cpu_s_per_1000(self) -> float:
        """CPU seconds of the generator per 1,000 requests. Raises ZeroDivisionError if there were none."""
        return 1000 * self.cpu_s / self.requests


class NoopProtocol(asyncio.Protocol):
    """The server that does nothing, as fast as Python can. Answers every complete request head; requests have no body,
    and may arrive in pieces or several at once."""

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
            self._transport.write(_RESPONSE * requests)


def _tell() -> None:
    for _ in sys.stdin:
        print(NoopProtocol.served, flush=True)


async def _serve_and_count() -> None:
    """Serve on a free port and print it; print the number of requests so far after each line on standard input."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(NoopProtocol, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, _tell)
    server.close()


def _serve() -> None:
    """Run the server, until standard input ends."""
    uvloop.run(_serve_and_count())


class NoopServer:
    """The server that does nothing, in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{said(process)}"

    def served(self) -> int:
        """Return the number of requests so far."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return int(said(self._process))


@contextmanager
def noop_server() -> Iterator[NoopServer]:
    """Run the server. Raises `SystemFailed`."""
    with started(_serve) as process:
        yield NoopServer(process)


def measure(
    command: Sequence[str], server: NoopServer, *, settle_s: float, seconds: float, fine: Sequence[int] = (0,)
) -> tuple[ThroughputWindow, str]:
    """Start a generator, let it settle after its first request, measure, and wait for its end.

    Returns the window and the generator's standard output. Raises `SystemFailed` if it sends nothing or fails.
    """
    before, until_s = server.served(), time.monotonic() + _START_S
    window: ThroughputWindow | None = None
    generator = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while server.served() == before and generator.poll() is None and time.monotonic() < until_s:
            time.sleep(0.05)
        time.sleep(settle_s)
        started, started_s, cpu_s = server.served(), time.monotonic(), _tree_cpu_s(generator.pid)
        time.sleep(seconds)
        window = ThroughputWindow(
            requests=server.served() - started,
            seconds=time.monotonic() - started_s,
            cpu_s=_tree_cpu_s(generator.pid) - cpu_s,
        )
        out, errors = generator.communicate(timeout=_START_S)
    except (subprocess.TimeoutExpired, psutil.NoSuchProcess):
        generator.kill()
        out, errors = generator.communicate()
    finally:
        generator.kill()
        generator.wait()
    if window is None or not window.requests or generator.returncode not in fine:
        raise SystemFailed(f"{' '.join(command)} ended with {generator.returncode}: {errors.strip()[-500:]}")
    return window, out


def _tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all its live children. Raises psutil.NoSuchProcess if it has ended."""
    process, used_s = psutil.Process(pid), 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            used_s += sum(each.cpu_times()[:2])
    return used_s
