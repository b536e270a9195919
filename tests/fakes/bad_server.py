"""A server that does everything wrong, by path, or by the prompt of a JSON body: raw sockets, one thread a connection.

A behaviour gets the socket and how many requests this connection has served before; it returns whether to go on.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 50
ENDLESS = b"x" * 65536


class BadServer:
    """``url`` and what was asked in ``asked``, in order. ``behaviours`` are those below, by name."""

    def __init__(self, certificate: Path | None = None, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._tls = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate)
        self._listener = socket.create_server(address, backlog=512)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://{address[0]}:{self.port}"
        self.asked: list[str] = []
        self.behaviours = BEHAVIOURS
        self.stopped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops listening and lets stalled connections go. Idempotent."""
        if self.stopped.is_set():
            return
        self.stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept, which keeps the port open
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        served = 0
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
        except OSError:
            return
        with connection:
            try:
                while name := self._read_request(connection):
                    self.asked.append(f"/{name}")
                    if not self.behaviours[name](self, connection, served):
                        return
                    served += 1
            except OSError:
                return

    def _read_request(self, connection: socket.socket) -> str:
        """The behaviour that the next request asks for, its body read; empty at the end of the connection."""
        data = b""
        while b"\r\n\r\n" not in data:
            piece = connection.recv(65536)
            if not piece:
                return ""
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        while len(body) < length:
            body += connection.recv(65536)
        name = head.split(b" ")[1].decode().lstrip("/")
        return name if name in self.behaviours else json.loads(body)["prompt"]


Behaviour = Callable[[BadServer, socket.socket, int], bool]


def says(*pieces: bytes, goes_on: bool = False, pause_s: float = 0.0) -> Behaviour:
    """Sends the pieces, then keeps or closes the connection."""

    def behave(_server: BadServer, connection: socket.socket, _served: int) -> bool:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
        return goes_on

    return behave


def hangs(begin: bytes) -> Behaviour:
    """Begins an answer, and never says more."""

    def behave(server: BadServer, connection: socket.socket, _served: int) -> bool:
        connection.sendall(begin)
        server.stopped.wait()
        return False

    return behave


def reset(_server: BadServer, connection: socket.socket, _served: int) -> bool:
    """Resets the connection instead of an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def endless(server: BadServer, connection: socket.socket, _served: int) -> bool:
    """A body without an end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while not server.stopped.is_set():
        connection.sendall(ENDLESS)
    return False


def trickle(server: BadServer, connection: socket.socket, _served: int) -> bool:
    """A byte now and then: never silent for long, never done."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not server.stopped.wait(0.02):
        connection.sendall(b"x")
    return False


def once(_server: BadServer, connection: socket.socket, served: int) -> bool:
    """Promises to keep the connection, and closes it when the second request has come."""
    if served == 0:
        connection.sendall(OK)
    return served == 0


def swallows(answer: bytes) -> Behaviour:
    """Answers the first request of a connection; reads the second, and resets a while later."""

    def behave(server: BadServer, connection: socket.socket, served: int) -> bool:
        if served == 0:
            connection.sendall(answer)
            return True
        time.sleep(0.3)
        return reset(server, connection, served)

    return behave


def leaves(answer: bytes) -> Behaviour:
    """Answers and ends the connection in one packet, without having said so: nothing that comes later is read."""

    def behave(_server: BadServer, connection: socket.socket, _served: int) -> bool:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connection.sendall(answer)
        return False

    return behave


def late(seconds: float) -> Behaviour:
    """A good answer after that time."""

    def behave(_server: BadServer, connection: socket.socket, _served: int) -> bool:
        time.sleep(seconds)
        connection.sendall(OK)
        return True

    return behave


BEHAVIOURS: dict[str, Behaviour] = {
    "ok": says(OK, goes_on=True),
    "slow": late(0.05),
    "second": late(1.0),
    "swallows": swallows(OK),
    "leaves": leaves(OK),
    "http2": says(b"\0\0\6\4\0\0\0\0\0\0\3\0\0\0\x64"),
    "dead": hangs(b""),
    "bad-chunk": says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n"),
    "long-head": says(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000),
    "truncated": says(HALF),
    "truncated-head": says(b"HTTP/1.1 200 OK\r\nConte"),
    "stall": hangs(HALF),
    "endless": endless,
    "huge": says(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + ENDLESS * 4),
    "trickle": trickle,
    "once": once,
    "chunked": says(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n2;x=y\r",
        b"\nok\r",
        b"\n4\r\n and\r\n0\r\nTrailer: 1\r\n\r\n",
        goes_on=True,
        pause_s=0.01,
    ),
    "until-close": says(b"HTTP/1.0 200 OK\r\n\r\nok"),
    "closes": says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: Close\r\n\r\nok"),
    "no-content": says(b"HTTP/1.1 204 No Content\r\n\r\n", goes_on=True),
    "head": says(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", goes_on=True),
    "babbles": says(OK + b"and more", goes_on=True),
    "byte-by-byte": says(*(bytes([byte]) for byte in OK), goes_on=True, pause_s=0.001),
    "503": says(b"HTTP/1.1 503 Whatever\r\ncontent-length: 0\r\n\r\n", goes_on=True),
}


@contextmanager
def bad_server(certificate: Path | None = None) -> Iterator[BadServer]:
    """A running one; with a certificate it speaks TLS."""
    server = BadServer(certificate)
    try:
        yield server
    finally:
        server.close()
