"""A server of image requests with a ledger of its own: for each prompt, how it ended what was asked, and with how many
images. It does what servers do and what they should not, so that a load tester's report can be held against it."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fakes import bad_server
from fakes.bad_server import BadServer, Behaviour, says
from plait_loadtest.values import RequestOutcome as Ended

BIG_BYTES = 64 << 20
"""The largest answer that a scenario takes by default."""

_IMAGE = {"b64_json": "aGVsbG8="}


def answer(*images: object, status: str = "200 OK", more: str = "") -> bytes:
    """A whole answer with a body of OpenAI's."""
    body = json.dumps({"created": 0, "data": images}).encode()
    return f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunks(*pieces: bytes, kind: str = "application/json") -> list[bytes]:
    """A head and a chunk for each piece, without the last one that ends the body."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return [head, *(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)]


def stream(*events: bytes) -> Behaviour:
    """Server-sent events, and a clean end."""
    return says(*chunks(*events, kind="text/event-stream"), b"0\r\n\r\n", goes_on=True)


OK = answer(_IMAGE)
_BODY = OK.partition(b"\r\n\r\n")[2]
_PREVIEW = b'event: image_generation.partial_image\ndata: {"b64_json": "aGVsbG8="}\n\n'
_FINISHED = b'event: image_generation.completed\ndata: {"b64_json": "aGVsbG8="}\n\n'


def _swallows(server: HonestServer, connection: socket.socket, served: int) -> bool:
    if served == 0:
        server.told("swallows", Ended.OK, 1)
        connection.sendall(OK)
        return True
    server.told("swallows", Ended.RESET, 0)
    time.sleep(0.3)
    return bad_server.reset(server, connection, served)


def _big(_server: BadServer, connection: socket.socket, _served: int) -> bool:
    front, back = b'{"data": [{"b64_json": "', b'"}]}'
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {BIG_BYTES}\r\n\r\n".encode() + front)
    left = BIG_BYTES - len(front) - len(back)
    connection.sendall(b"A" * left + back)
    return True


@dataclass(frozen=True)
class Row:
    """A behaviour, how it ends a request, and the images that it really sends. `n`: images asked for."""

    behave: Behaviour
    ends: Ended = Ended.OK
    images: int = 0
    n: int = 1
    streams: bool = False
    weight: float = 1.0


BEHAVIOURS: dict[str, Row] = {
    "plain": Row(says(OK, goes_on=True), images=1),
    "four": Row(says(answer(*[_IMAGE] * 4), goes_on=True), images=4, n=4),
    "chunked": Row(says(*chunks(_BODY[:7], _BODY[7:]), b"0\r\nTrailer: 1\r\n\r\n", goes_on=True), images=1),
    "until-close": Row(says(b"HTTP/1.0 200 OK\r\n\r\n" + _BODY), images=1),
    "says-close": Row(says(answer(_IMAGE, more="Connection: close\r\n")), images=1),
    "leaves": Row(bad_server.leaves(OK), images=1),
    "slow-head": Row(says(*(OK[at : at + 9] for at in range(0, 72, 9)), OK[72:], goes_on=True, pause_s=0.02), images=1),
    "early-hints": Row(
        says(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + OK, goes_on=True),
        images=1,
    ),
    "big": Row(_big, images=1, weight=0.1),
    "streamed": Row(stream(_PREVIEW, _FINISHED), images=1, streams=True),
    "swallows": Row(_swallows),  # keeps the ledger itself
    "resets": Row(bad_server.reset, Ended.RESET),
    "hangs-up": Row(says(), Ended.RESET),
    "truncated": Row(says(OK[:-1]), Ended.TRUNCATED),
    "truncated-chunks": Row(says(*chunks(_BODY)), Ended.TRUNCATED),
    "garbage": Row(says(b"\x16\x03\x01 this is not http at all\r\n\r\n"), Ended.GARBLED),
    "moved": Row(says(answer(status="302 Found", more="Location: /there\r\n"), goes_on=True), Ended.HTTP_OTHER),
    "missing": Row(says(answer(status="404 Not Found"), goes_on=True), Ended.HTTP_4XX),
    "overloaded": Row(says(answer(status="503 Service Unavailable"), goes_on=True), Ended.HTTP_5XX),
    "one-of-four": Row(says(OK, goes_on=True), Ended.CHECK, images=1, n=4),
    "empty-image": Row(says(answer({"b64_json": ""}), goes_on=True), Ended.CHECK),
    "error-close": Row(stream(_PREVIEW, b'data:{"error": {"message": "x"}}\n\n'), Ended.CHECK, streams=True),
    "error-event": Row(stream(_PREVIEW, b'event: error\ndata: {"type": "error"}\n\n'), Ended.CHECK, streams=True),
    "preview-only": Row(stream(_PREVIEW), Ended.CHECK, streams=True),
    "dead": Row(bad_server.hangs(b""), Ended.TIMEOUT),
}


class HonestServer(BadServer):
    """The server. A request's prompt is the name of a behaviour."""

    def __init__(self) -> None:
        self._ledger: list[tuple[str, Ended, int]] = []
        super().__init__()
        self.behaviours = {name: _entered(name, row) for name, row in BEHAVIOURS.items()}

    def told(self, name: str, ends: Ended, images: int) -> None:
        """Enter a request that was read."""
        self._ledger.append((name, ends, images))  # atomic, and there are many threads

    @property
    def ends(self) -> Counter[tuple[str, str]]:
        """Requests by behaviour and how they ended."""
        return Counter((name, ends.name.lower()) for name, ends, _ in self._ledger)

    @property
    def images(self) -> int:
        """All images that were sent."""
        return sum(images for *_, images in self._ledger)


def _entered(name: str, row: Row) -> Callable[[HonestServer, socket.socket, int], bool]:
    def behave(server: HonestServer, connection: socket.socket, served: int) -> bool:
        if row.behave is not _swallows:
            server.told(name, row.ends, row.images)
        return row.behave(server, connection, served)

    return behave
