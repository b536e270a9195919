"""The control request beside the load, in a process of its own: one thread answers, one asks at fixed times."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from multiprocessing.connection import Connection as Pipe

import numpy as np

from plait_loadtest.run.processes import ignore_ending, started, told
from plait_loadtest.values import Echo

MESSAGE = b"are you there?"

RATE_PER_S = 20.0
"""Enough for a p95 within ten seconds, at the cost of 0.1 % of a core."""

_ANSWER_S = 5.0


class EchoClock:
    """The control request's process. It only observes: if it dies, the run continues without it.

    The request is our own echo, asked for at a steady rate beside the load. It shares only the machine with the
    generator, neither process nor interpreter lock: whatever it takes longer than usual, this host adds to every
    latency of the run.
    """

    def __init__(self) -> None:
        self._pipe, self._process = started(main, int(1e9 / RATE_PER_S), "loadtest-echo")

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join(_ANSWER_S)

    def wait_ready(self) -> None:
        """Wait until it can be started, for a few seconds at most."""
        self._ask()

    def start(self, start_ns: int) -> None:
        """Send control requests from `start_ns` on."""
        told(self._pipe, start_ns)

    def stop(self) -> Echo:
        """Return what it measured; nothing if it died."""
        told(self._pipe, "stop")
        seen = self._ask()
        scheduled_ns, latency_ns = seen if isinstance(seen, tuple) else ([], [])
        return Echo(
            scheduled_ns=np.array(scheduled_ns, dtype=np.int64), latency_ns=np.array(latency_ns, dtype=np.int64)
        )

    def _ask(self) -> object:
        try:
            return self._pipe.recv() if self._pipe.poll(_ANSWER_S) else None
        except (EOFError, OSError):
            return None


_ALONE_S = 3.0  # enough for the p99 to be about the largest of sixty


def is_slow_alone(limit_ms: float) -> bool:
    """Return whether control requests take longer than this (p99) while there is no load: then it is not the load."""
    with closing(EchoClock()) as echo:
        echo.wait_ready()
        echo.start(time.perf_counter_ns())
        time.sleep(_ALONE_S)
        latency_ns = echo.stop().latency_ns
    return bool(latency_ns.size) and float(np.percentile(latency_ns, 99.0)) / 1e6 > limit_ms


# ---- inside the process ----------------------------------------------------------------------------------------------


def main(gap_ns: int, pipe: Pipe) -> None:
    """Send "ready", receive the start (perf_counter_ns), and ask every `gap_ns` until any other message arrives.

    Sends back `(scheduled_ns, latency_ns)`, two lists counted from the start; a late reply delays the next request
    but not the time that it counts from.
    """
    ignore_ending()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer, args=(server,), daemon=True).start()
        with socket.create_connection(server.getsockname()) as asking:
            asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                pipe.send("ready")
                start_ns = pipe.recv()
                pipe.send(_ask(pipe, asking, start_ns, gap_ns) if isinstance(start_ns, int) else ([], []))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return  # the coordinator is gone


def _ask(pipe: Pipe, asking: socket.socket, start_ns: int, gap_ns: int) -> tuple[list[int], list[int]]:
    scheduled_ns: list[int] = []
    latency_ns: list[int] = []
    due_ns = start_ns
    while True:
        wait_s = (due_ns - time.perf_counter_ns()) / 1e9
        if pipe.poll(0):
            return scheduled_ns, latency_ns
        if wait_s > 0:
            time.sleep(wait_s)
        asking.sendall(MESSAGE)
        came = 0
        while came < len(MESSAGE):
            came += len(asking.recv(len(MESSAGE)))
        scheduled_ns.append(due_ns - start_ns)
        latency_ns.append(time.perf_counter_ns() - due_ns)
        due_ns += gap_ns


def _answer(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while question := connection.recv(len(MESSAGE)):
            connection.sendall(question)
