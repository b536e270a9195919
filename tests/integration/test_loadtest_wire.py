"""The client connection and its pool against servers that do everything wrong: every end has its class."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from dataclasses import dataclass
from itertools import pairwise

import pytest
import uvloop

from plait_loadtest.scenario import LoadTarget
from plait_loadtest.values import PreparedRequest, RequestOutcome
from plait_loadtest.wire.dial import Dialler, RequestWriter, place_of
from plait_loadtest.wire.pool import ConnectionPool, Rules, SendJob
from support.bad_server import bad_server


@dataclass
class End:
    """What became of a request."""

    outcome: RequestOutcome
    status: int = 0
    body: bytes = b""
    sent_ns: int = -1
    first_byte_ns: int = -1
    first_part_ns: int = -1
    done_ns: int = -1
    received_bytes: int = 0
    server_ms: float = 0.0
    why: str = ""


@dataclass
class Asked:
    """All ends, by order of asking, and the pool's own count."""

    ends: list[End]
    reconnects: int
    left_open: int


def ask(
    url,
    *paths,
    method="GET",
    body=b"",
    at_once=False,
    room=8,
    timeout_s=20.0,
    cancel_after_s=None,
    limit_bytes=1 << 20,
    close_after_s=None,
    pause_s=0.0,
    **target,
):
    """Asks for each path, one after the other or all at once."""

    async def main():
        place = place_of(url)
        writer = RequestWriter(place, {})
        ends = {}
        changed = asyncio.Event()

        def on_end(slot, outcome, now_ns, connection):
            ends[slot] = End(outcome, done_ns=now_ns)
            if isinstance(connection, str):
                ends[slot].why = connection
            else:
                ends[slot] = End(
                    outcome,
                    connection.head.status,
                    connection.body,
                    connection.sent_ns,
                    connection.first_byte_ns,
                    connection.first_part_ns,
                    now_ns,
                    connection.received_bytes,
                    connection.head.server_ms,
                    connection.why,
                )
            changed.set()

        rules = Rules(
            room=room,
            timeout_s=timeout_s,
            cancel_after_s=cancel_after_s or 1.0,
            keeps_body=True,
            limit_bytes=limit_bytes,
        )
        pool = ConnectionPool(Dialler(place, LoadTarget(url=url, **target)).dial, rules, on_end)

        async def wait_for(count):
            while len(ends) < count:
                changed.clear()
                await asyncio.wait_for(changed.wait(), 20)

        for slot, path in enumerate(paths):
            request = writer.bytes_of(PreparedRequest(method=method, path=path, body=body))
            pool.submit(SendJob(slot, request, cancel_after_s is not None))
            if not at_once:
                await wait_for(slot + 1)
                await asyncio.sleep(pause_s)
        if close_after_s is not None:
            await asyncio.sleep(close_after_s)
        else:
            await wait_for(len(paths))
        pool.close()
        return Asked([ends[slot] for slot in range(len(paths))], pool.reconnects, pool.in_flight)

    return uvloop.run(main())


@pytest.fixture(scope="module")
def server():
    """One bad server for all."""
    with bad_server() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "outcome"),
    [
        ("ok", RequestOutcome.OK),
        ("byte-by-byte", RequestOutcome.OK),
        ("until-close", RequestOutcome.OK),
        ("closes", RequestOutcome.OK),
        ("continues", RequestOutcome.OK),
        ("no-content", RequestOutcome.OK),
        ("babbles", RequestOutcome.OK),
        ("hangs-up", RequestOutcome.RESET),
        ("reset", RequestOutcome.RESET),
        ("garbage", RequestOutcome.GARBLED),
        ("bad-length", RequestOutcome.GARBLED),
        ("two-lengths", RequestOutcome.GARBLED),
        ("bad-chunk", RequestOutcome.GARBLED),
        ("long-head", RequestOutcome.GARBLED),
        ("endless", RequestOutcome.GARBLED),
        ("huge", RequestOutcome.GARBLED),
        ("truncated", RequestOutcome.TRUNCATED),
        ("truncated-head", RequestOutcome.TRUNCATED),
        ("truncated-chunks", RequestOutcome.TRUNCATED),
        ("302", RequestOutcome.HTTP_OTHER),
        ("404", RequestOutcome.HTTP_4XX),
        ("503", RequestOutcome.HTTP_5XX),
    ],
)
def test_every_answer_has_its_class(server, path, outcome):
    """Whatever a server answers, the request ends in the class of what happened; the next one goes on unharmed."""
    first, second = ask(server.url, f"/{path}", "/ok", limit_bytes=100_000).ends
    assert first.outcome is outcome
    assert second.outcome is RequestOutcome.OK
    assert second.body == b"ok"


@pytest.mark.parametrize("path", ["dead", "stall", "trickle"])
def test_what_takes_too_long_is_given_up(server, path):
    """Silence, half a body and a trickle all end at the time limit, which counts from sending."""
    (end,) = ask(server.url, f"/{path}", timeout_s=0.2).ends
    assert end.outcome is RequestOutcome.TIMEOUT
    assert 0.2 <= (end.done_ns - end.sent_ns) / 1e9 < 10.0
    assert (end.first_byte_ns > 0) == (path != "dead")


def test_bodies_arrive_whole(server):
    """Chunks in any pieces, a body until the end of the connection, and no body where there can be none."""
    chunked, until_close, empty = ask(server.url, "/chunked", "/until-close", "/no-content").ends
    assert (chunked.outcome, chunked.body) == (RequestOutcome.OK, b"ok and")
    assert (until_close.outcome, until_close.body) == (RequestOutcome.OK, b"ok")
    assert (empty.outcome, empty.body, empty.status) == (RequestOutcome.OK, b"", 204)


def test_a_head_request_has_no_body(server):
    """The announced length of an answer to HEAD is not waited for."""
    ends = ask(server.url, "/head", "/head", method="HEAD", timeout_s=60.0).ends
    assert [end.outcome for end in ends] == [RequestOutcome.OK] * 2


def test_the_first_event_of_a_stream_is_stamped(server):
    """Comments and the event's name come earlier; the first ``data:`` counts, also if it comes in two pieces."""
    (end,) = ask(server.url, "/sse").ends
    assert end.outcome is RequestOutcome.OK
    assert end.body.endswith(b'data: {"a":1}\n\n')
    assert (end.first_part_ns - end.first_byte_ns) / 1e9 >= 0.12  # two or three pauses of 50 ms lie between them
    assert end.first_part_ns < end.done_ns
    assert ask(server.url, "/ok").ends[0].first_part_ns == -1


def test_the_server_timing_header_is_read(server):
    """Its ``total`` is what the server says it took."""
    assert ask(server.url, "/timed").ends[0].server_ms == 2.25


def test_nobody_there():
    """A port without a server, a name that does not exist and a server without TLS are told apart, and none raises."""
    with bad_server() as closed:
        pass
    assert ask(closed.url, "/ok").ends[0].outcome is RequestOutcome.CONNECT
    assert ask("http://no-such-host.invalid", "/ok").ends[0].outcome is RequestOutcome.DNS
    assert ask(f"http://{'x' * 80}.invalid", "/ok").ends[0].outcome is RequestOutcome.DNS
    with bad_server() as plain:
        assert (
            ask(plain.url.replace("http:", "https:"), "/ok", connect_timeout_s=1.0).ends[0].outcome
            is RequestOutcome.CONNECT
        )


def test_a_connection_that_closed_while_idle_costs_no_error(server):
    """The request is sent again on a fresh connection, once, and counted; a first request is never sent again."""
    asked = ask(server.url, "/once", "/once", "/hangs-up")
    assert [end.outcome for end in asked.ends] == [RequestOutcome.OK, RequestOutcome.OK, RequestOutcome.RESET]
    assert asked.reconnects == 2  # the second /once, and /hangs-up; that got a fresh connection and closed that too


def test_there_is_no_other_retry(server):
    """A server that closes before it answers gets each request once if the connection is new."""
    before = server.asked.count("/reset")
    asked = ask(server.url, "/reset", "/reset", "/reset", at_once=True)
    assert [end.outcome for end in asked.ends] == [RequestOutcome.RESET] * 3
    assert (server.asked.count("/reset") - before, asked.reconnects) == (3, 0)


def test_an_idle_connection_that_closes_is_forgotten(server):
    """Its place is free again: with room for one connection the next request gets a new one."""
    ends = ask(server.url, "/closes", "/until-close", "/babbles", "/ok", room=1, pause_s=0.05).ends
    assert [end.outcome for end in ends] == [RequestOutcome.OK] * 4


def test_requests_wait_for_room_in_order(server):
    """With one connection, requests go one after the other, first come first served, and none is lost."""
    ends = ask(server.url, *["/slow"] * 5, at_once=True, room=1).ends
    assert [end.outcome for end in ends] == [RequestOutcome.OK] * 5
    sent = [end.sent_ns for end in ends]
    assert sent == sorted(sent)
    assert all(later - earlier >= 50_000_000 for earlier, later in pairwise(sent))


def test_what_has_no_room_until_the_end_was_not_sent(server):
    """At the end what is in flight is interrupted, what waits was not sent."""
    ends = ask(server.url, *["/dead"] * 4, at_once=True, room=2, close_after_s=0.3).ends
    assert [end.outcome for end in ends] == [RequestOutcome.INTERRUPTED] * 2 + [RequestOutcome.NOT_SENT] * 2
    assert [end.sent_ns > 0 for end in ends] == [True, True, False, False]


def test_requests_are_cancelled_on_purpose(server):
    """A cancelled request ends when it is given up; one that was answered before stays answered."""
    dead, ok = ask(server.url, "/dead", "/ok", cancel_after_s=0.1).ends
    assert (dead.outcome, ok.outcome) == (RequestOutcome.CANCELLED, RequestOutcome.OK)
    assert 0.095 <= (dead.done_ns - dead.sent_ns) / 1e9 < 10.0


def test_large_requests_get_through(server):
    """A body larger than any socket buffer is written whole."""
    (end,) = ask(server.url, "/ok", method="POST", body=b"x" * (4 << 20)).ends
    assert end.outcome is RequestOutcome.OK


def test_many_at_once(server):
    """No request is lost among many connections."""
    started_s = time.monotonic()
    ends = ask(server.url, *["/slow"] * 60, at_once=True, room=30).ends
    assert [end.outcome for end in ends] == [RequestOutcome.OK] * 60
    assert time.monotonic() - started_s >= 0.1  # two rounds of 50 ms


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for localhost that nobody signed but itself, and its key in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make a certificate")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([openssl, "req", *options, "-keyout", path, "-out", f"{path}.crt"], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + (path.parent / "both.pem.crt").read_bytes())
    return path


def test_tls_is_spoken_and_verified(certificate):
    """An unknown certificate is no connection, unless the scenario says not to verify."""
    with bad_server(certificate) as server:
        url = server.url.replace("http:", "https:")
        ends = ask(url, "/ok", "/chunked", "/once", "/once", "/truncated", verify_tls=False).ends
        assert [end.outcome for end in ends] == [RequestOutcome.OK] * 4 + [RequestOutcome.TRUNCATED]
        assert ends[1].body == b"ok and"
        (refused,) = ask(url, "/ok").ends
        assert refused.outcome is RequestOutcome.CONNECT
        assert "certificate verify failed" in refused.why
