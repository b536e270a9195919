"""The report against the server's own ledger: equal to the request, whatever the server does."""

from __future__ import annotations

import json
import socket
from collections import Counter
from contextlib import closing
from dataclasses import dataclass

import pytest

from fakes import bad_server
from fakes.bad_server import BadServer, Behaviour, says
from plait_loadtest.scenario import Scenario
from plait_loadtest.session import run_scenario
from plait_loadtest.values import RequestOutcome as Ended
from support.waiting import wait_for

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


def _big(_server: BadServer, connection: socket.socket, _served: int) -> bool:
    front, back = b'{"data": [{"b64_json": "', b'"}]}'
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {BIG_BYTES}\r\n\r\n".encode() + front)
    left = BIG_BYTES - len(front) - len(back)
    connection.sendall(b"A" * left + back)
    return True


@dataclass(frozen=True)
class Row:
    """A behaviour, how it ends a request, and the images that it really sends. `n`: images asked for; `later`: how it
    ends all but the first of a connection, without images."""

    behave: Behaviour
    ends: Ended = Ended.OK
    later: Ended | None = None
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
    "swallows": Row(bad_server.swallows(OK), images=1, later=Ended.RESET),
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
    """A server with a ledger of its own: for each prompt, which is the name of a behaviour, how it ended what was
    asked, and with how many images."""

    def __init__(self) -> None:
        self._ledger: list[tuple[str, Ended, int]] = []
        super().__init__()
        self.behaviours = {name: self._entered(name, row) for name, row in BEHAVIOURS.items()}

    @property
    def ends(self) -> Counter[tuple[str, str]]:
        """Requests by behaviour and how they ended."""
        return Counter((name, ends.name.lower()) for name, ends, _ in self._ledger)

    @property
    def images(self) -> int:
        """All images that were sent."""
        return sum(images for *_, images in self._ledger)

    def _entered(self, name: str, row: Row) -> Behaviour:
        def behave(server: BadServer, connection: socket.socket, served: int) -> bool:
            ends, images = (row.ends, row.images) if row.later is None or served == 0 else (row.later, 0)
            self._ledger.append((name, ends, images))  # atomic, and there are many threads
            return row.behave(server, connection, served)

        return behave


def scenario_of(url, names, *, timeout_s=300.0, **settings):
    """Image requests of each of these behaviours."""
    rows = {name: BEHAVIOURS[name] for name in names}
    mix = [
        {"api": "images", "name": name, "prompts": [name], "images": row.n, "stream": row.streams, "weight": row.weight}
        for name, row in rows.items()
    ]
    target = {"url": url, "timeout_s": timeout_s}
    arrivals = {"kind": "poisson", "rate_per_s": 200}
    return Scenario.model_validate({"mix": mix, "arrivals": arrivals, "target": target, **settings})


def held_against_the_ledger(names, **settings):
    """Runs the load and compares all counts; returns the number of requests of each behaviour."""
    with closing(HonestServer()) as server:
        session = run_scenario(scenario_of(server.url, names, **settings))
        wait_for(lambda: server.ends.total() >= len(session.result.records))  # a busy one reads what was given up later
    records, scenario = session.result.records, session.scenario
    ends = Counter(
        (scenario.mix[kind].name, Ended(outcome).name.lower())
        for kind, outcome in zip(records["kind"], records["outcome"], strict=True)
    )
    assert ends == server.ends
    assert int(records["images"].sum()) == server.images
    assert (records["sent_ns"] >= 0).all()
    total, summary = Counter(outcome for _, outcome in ends.elements()), session.summary
    assert (summary.total.requests, summary.total.succeeded) == (ends.total(), total.pop("ok", 0))
    assert summary.total.errors == total
    for name, each in summary.total.failures.items():
        assert sum(one.count for one in each) <= total[name]
        assert all(one.why.startswith(WHYS.get(name, "")) for one in each)
    assert WHYS.keys() & total.keys() <= summary.total.failures.keys()
    for each in summary.classes:
        own = {outcome: count for (name, outcome), count in server.ends.items() if name == each.name}
        assert (each.requests, each.succeeded) == (sum(own.values()), own.pop("ok", 0))
        assert each.errors == own
    return Counter(name for name, _ in ends.elements())


WHYS = {
    "http_other": "302: to /there",
    "http_4xx": "404: {",
    "http_5xx": "503: {",
    "garbled": "not a status line: ",
    "timeout": "target.timeout_s (1 s) was over",
}
"""How the reasons for errors begin that a class of them has one of."""
ANSWERING = [name for name in BEHAVIOURS if name != "dead"]


def test_every_request_is_told_as_the_server_knows_it():
    """300 requests of three processes to a server of 24 behaviours: each class has the server's own counts."""
    seen = held_against_the_ledger(ANSWERING, count=300, processes=3)
    assert set(seen) >= set(ANSWERING) - {"big"}


@pytest.mark.slow
def test_it_is_so_at_length():
    """10 s at 200/s, with bodies of 64 MiB."""
    seen = held_against_the_ledger(ANSWERING, duration_s=10, processes=1)
    assert set(seen) == set(ANSWERING)


def test_requests_that_are_never_answered_are_told_so():
    """After the time that the scenario gives them."""
    assert held_against_the_ledger(["dead"], count=20, processes=1, timeout_s=1) == {"dead": 20}
