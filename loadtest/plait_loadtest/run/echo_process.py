"""The echo's own process: one thread answers, one asks at fixed times. Standard library only, to start fast."""

from __future__ import annotations

import socket
import threading
import time
from multiprocessing.connection import Connection as Pipe

from plait_loadtest.run.processes import ignore_ending

MESSAGE = b"are you there?"


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
