"""The client connection and its pool against servers that do everything wrong: every end has its class."""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest
import uvloop

from fakes.bad_server import BadServer, bad_server
from plait_loadtest.failures import DESCRIPTORS, MEMORY, PORTS, ROOM
from plait_loadtest.scenario import GeneratorLimits, LoadTarget, Scenario
from plait_loadtest.values import PreparedRequest, RequestOutcome
from plait_loadtest.wire.dial import LOOKUP_S, Dialler, RequestWriter, place_of
from plait_loadtest.wire.framing import HTTP2
from plait_loadtest.wire.pool import ConnectionPool, SendJob

WAIT_S = 60.0


def ask(
    url,
    *paths,
    method="GET",
    body=b"",
    at_once=False,
    room=8,
    timeout_s=WAIT_S,
    limit_bytes=1 << 20,
    pause_s=0.0,
    dialler=None,
    between=lambda slot: None,
    **target,
):
    """Asks for each path, one after the other or all at once: all ends, by order of asking, with outcome, `done_ns` and
    what the connection knew, and the pool's own counts. ``between`` is called after each end."""

    async def main():
        place = place_of(url)
        writer = RequestWriter(place, {})
        ends = {}
        changed = asyncio.Event()

        def on_end(slot, outcome, now_ns, connection):
            known = {"sent_ns": -1, "why": connection}
            if not isinstance(connection, str):
                known = {name: getattr(connection, name) for name in ("sent_ns", "why", "first_byte_ns", "body")}
            ends[slot] = SimpleNamespace(outcome=outcome, done_ns=now_ns, **known)
            changed.set()

        limits = GeneratorLimits(response_bytes=limit_bytes)
        scenario = Scenario(target=LoadTarget(url=url, timeout_s=timeout_s, **target), limits=limits)
        own = dialler or Dialler(place, scenario.target)
        pool = ConnectionPool(own.dial, scenario, on_end, room=room, keeps_body=True)
        own.on_addresses = pool.spread

        async def wait_for(count):
            while len(ends) < count:
                changed.clear()
                await asyncio.wait_for(changed.wait(), WAIT_S)

        for slot, path in enumerate(paths):
            request = writer.bytes_of(PreparedRequest(method=method, path=path, body=body))
            pool.submit(SendJob(slot, request))
            if not at_once:
                await wait_for(slot + 1)
                await asyncio.sleep(pause_s)
                between(slot)
        await wait_for(len(paths))
        pool.close()
        in_order = [ends[slot] for slot in range(len(paths))]
        return SimpleNamespace(ends=in_order, reconnects=pool.reconnects, limits=dict(pool.limits))

    return uvloop.run(main())


@pytest.fixture(scope="module")
def server():
    """One bad server for all."""
    with bad_server() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "outcome"),
    [
        ("byte-by-byte", RequestOutcome.OK),
        ("no-content", RequestOutcome.OK),
        ("babbles", RequestOutcome.OK),
        ("bad-chunk", RequestOutcome.GARBLED),
        ("long-head", RequestOutcome.GARBLED),
        ("endless", RequestOutcome.GARBLED),
        ("http2", RequestOutcome.GARBLED),
        ("huge", RequestOutcome.GARBLED),
        ("truncated-head", RequestOutcome.TRUNCATED),
    ],
)
def test_every_answer_has_its_class(server, path, outcome):
    """Whatever a server answers, the request ends in the class of what happened; the next one goes on unharmed. (What
    servers do more often is in test_loadtest_conformance.py.)"""
    first, second = ask(server.url, f"/{path}", "/ok", limit_bytes=100_000).ends
    assert first.outcome is outcome
    assert second.outcome is RequestOutcome.OK
    assert second.body == b"ok"


@pytest.mark.parametrize("path", ["dead", "stall", "trickle"])
def test_what_takes_too_long_is_given_up(server, path):
    """Silence, half a body and a trickle all end at the time limit, which counts from sending."""
    (end,) = ask(server.url, f"/{path}", timeout_s=0.5).ends
    assert end.outcome is RequestOutcome.TIMEOUT
    assert end.done_ns - end.sent_ns >= 0.5e9
    assert path != "dead" or end.first_byte_ns == -1


def test_a_head_request_has_no_body(server):
    """The announced length of an answer to HEAD is not waited for."""
    ends = ask(server.url, "/head", "/head", method="HEAD").ends
    assert [end.outcome for end in ends] == [RequestOutcome.OK] * 2


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


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/swallows", "/once"])
def test_what_may_have_been_read_is_never_sent_again(path, method):
    """A server that reads every second request of a connection and resets or ends it gets each request once; each of
    these is an error."""
    with bad_server() as server:
        asked = ask(server.url, *[path] * 4, method=method, body=b"{}" if method == "POST" else b"")
    assert [end.outcome for end in asked.ends] == [RequestOutcome.OK, RequestOutcome.RESET] * 2
    assert (server.asked, asked.reconnects) == ([path] * 4, 0)


@pytest.mark.parametrize("body", [b"", b"x" * (100 << 10)])
def test_a_connection_that_closed_before_the_request_is_replaced(body):
    """The server ends each connection with its answer, while the next request waits for it: that is written to an ended
    connection, leaves again on a new one, and is counted. Nothing reaches the server twice."""
    with bad_server() as server:
        asked = ask(server.url, *["/leaves"] * 10, method="POST", body=body, at_once=True, room=1)
    assert [end.outcome for end in asked.ends] == [RequestOutcome.OK] * 10
    assert (server.asked, asked.reconnects) == (["/leaves"] * 10, 9)


def dialling(url, before=lambda address: None, **options):
    """A dialler that calls `before` with each address; what that raises is what the system says of it."""

    class Dialling(Dialler):
        async def _connect(self, factory, address, failed):
            before(address)
            return await super()._connect(factory, address, failed)

    return Dialling(place_of(url), LoadTarget(url=url), **options)


def test_a_replaced_request_left_when_it_left_first():
    """Opening the new connection is part of what it took."""
    with bad_server() as server:
        slowly = dialling(server.url, lambda _: time.sleep(0.2))
        _, second = ask(server.url, "/leaves", "/leaves", at_once=True, room=1, dialler=slowly).ends
    assert second.outcome is RequestOutcome.OK
    assert (second.done_ns - second.sent_ns) / 1e9 >= 0.2


def says(*answers):
    """A look-up that gives these answers in turn, the last for good, and how often it was asked."""
    asked = []

    async def look_up(_host, _port):
        asked.append(None)
        return answers[min(len(asked), len(answers)) - 1]

    return look_up, asked


def named(port, look_up, **options):
    """A dialler to a name."""
    return dialling(f"http://somewhere.invalid:{port}", look_up=look_up, **options)


@pytest.fixture
def three():
    """Servers on three addresses with the same port."""
    with ExitStack() as stack:
        servers = [BadServer()]
        servers += [BadServer(address=(f"127.0.0.{last}", servers[0].port)) for last in (2, 3)]
        for each in servers:
            stack.callback(each.close)
        yield servers


@pytest.mark.parametrize("path", ["/ok", "/closes"])
def test_the_addresses_of_a_name_take_turns(three, path):
    """40 requests one after the other, on kept connections or new ones, are shared by three records; all are open after
    the first few."""
    look_up, _ = says(["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    ends = ask(three[0].url, *[path] * 40, dialler=named(three[0].port, look_up), pause_s=0.01).ends
    assert [end.outcome for end in ends] == [RequestOutcome.OK] * 40
    assert sum(len(each.asked) for each in three) == 40
    assert min(len(each.asked) for each in three) >= 10


def test_another_process_begins_with_another_address(three):
    """Else the first address would get one connection of each process more."""
    for turn in range(3):
        look_up, _ = says(["127.0.0.1", "127.0.0.2", "127.0.0.3"])
        ask(three[0].url, "/closes", dialler=named(three[0].port, look_up, turn=turn))
    assert [each.asked[0] for each in three] == ["/closes"] * 3


def test_a_name_that_moves_is_followed(three):
    """The old address is gone. Once the stated interval is over, the name is looked up, and new connections follow."""
    now_ns = [0]
    look_up, asked = says(["127.0.0.1"], ["127.0.0.2"])

    def between(slot):
        if slot == 0:
            three[0].close()
        if slot == 2:
            now_ns[0] = int(LOOKUP_S * 1e9)

    dialler = named(three[0].port, look_up, clock=lambda: now_ns[0])
    ends = ask(three[0].url, *["/closes"] * 6, dialler=dialler, between=between).ends
    gone = [RequestOutcome.CONNECT] * 3  # the last one asked for the name, and did not wait for the answer
    assert [end.outcome for end in ends] == [RequestOutcome.OK, *gone, *[RequestOutcome.OK] * 2]
    assert (len(asked), three[1].asked) == (2, ["/closes"] * 2)


def test_an_address_that_refuses_is_left_out_until_the_next_look_up(three):
    """Its requests go to the others, and it is tried once."""
    three[1].close()
    look_up, _ = says(["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    tried = []
    dialler = named(three[0].port, look_up, before=tried.append)
    ends = ask(three[0].url, *["/closes"] * 12, dialler=dialler, pause_s=0.01).ends
    assert [end.outcome for end in ends] == [RequestOutcome.OK] * 12
    assert Counter(tried)["127.0.0.2"] == 1
    assert min(len(three[0].asked), len(three[2].asked)) >= 5


def test_localhost_is_both_loopbacks(server):
    """Whatever the hosts file says, IPv6 is tried first and then IPv4, as everybody does who listens to one of them."""
    tried = []

    def before(address):
        tried.append(address)
        if address == "::1":
            raise ConnectionRefusedError

    url = f"http://localhost:{server.port}"
    assert ask(url, "/closes", "/closes", dialler=dialling(url, before)).ends[1].body == b"ok"
    assert tried == ["::1", "127.0.0.1", "127.0.0.1"]


@pytest.mark.parametrize(
    ("number", "limit"),
    [
        (errno.EMFILE, DESCRIPTORS), (errno.ENFILE, DESCRIPTORS), (errno.ENOBUFS, MEMORY), (errno.ENOMEM, MEMORY),
        (errno.EADDRNOTAVAIL, PORTS),
    ],
)  # fmt: skip
def test_a_limit_of_this_machine_is_no_refusal(server, number, limit):
    """Without descriptors, memory or ports a request is not sent, for that reason; refused is another thing, and so is
    an address that this machine never had a way to."""
    errors = [OSError(number, "no more"), None, OSError(number, "no more"), OSError(errno.ECONNREFUSED, "refused")]

    def fails(_):
        if error := errors.pop(0):
            raise error

    asked = ask(server.url, *["/closes"] * 4, dialler=dialling(server.url, fails))
    first = RequestOutcome.CONNECT if limit == PORTS else RequestOutcome.NOT_SENT
    expected = [first, RequestOutcome.OK, RequestOutcome.NOT_SENT, RequestOutcome.CONNECT]
    assert [end.outcome for end in asked.ends] == expected
    assert asked.limits == {limit: expected.count(RequestOutcome.NOT_SENT)}


def test_an_idle_connection_that_closes_is_forgotten(server):
    """Its place is free again: with room for one connection the next request gets a new one."""
    ends = ask(server.url, "/closes", "/until-close", "/babbles", "/ok", room=1, pause_s=0.05).ends
    assert [end.outcome for end in ends] == [RequestOutcome.OK] * 4


def test_a_connection_that_is_ended_at_once_is_its_requests_error():
    """Also if that comes before the request could be sent: nothing else breaks, and the next one has a connection of
    its own."""

    class Slow(Dialler):
        async def dial(self, factory):
            opened = await super().dial(factory)
            await asyncio.sleep(0.1)  # as if the server's end came in the same moment
            return opened

    def end_each():
        with suppress(OSError):
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=end_each, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ends = ask(url, "/ok", "/ok", room=1, dialler=Slow(place_of(url), LoadTarget(url=url))).ends
        listener.shutdown(socket.SHUT_RDWR)
    assert [(end.outcome, end.why) for end in ends] == [
        (RequestOutcome.RESET, "the connection ended before the request was sent")
    ] * 2


def test_requests_wait_for_room_in_order(server):
    """With one connection, requests go one after the other, first come first served, and none is lost; who had to wait
    is counted."""
    asked = ask(server.url, *["/slow"] * 5, at_once=True, room=1)
    assert [end.outcome for end in asked.ends] == [RequestOutcome.OK] * 5
    assert (asked.limits, ask(server.url, *["/slow"] * 2, room=1).limits) == ({ROOM: 4}, {})
    sent = [end.sent_ns for end in asked.ends]
    assert sent == sorted(sent)
    assert all(later - earlier >= 50_000_000 for earlier, later in pairwise(sent))


def test_large_requests_get_through(server):
    """A body larger than any socket buffer is written whole."""
    (end,) = ask(server.url, "/ok", method="POST", body=b"x" * (4 << 20)).ends
    assert end.outcome is RequestOutcome.OK


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
        ok, reset, truncated = RequestOutcome.OK, RequestOutcome.RESET, RequestOutcome.TRUNCATED
        assert [end.outcome for end in ends] == [ok, ok, reset, ok, truncated]
        assert ends[1].body == b"ok and"
        (refused,) = ask(url, "/ok").ends
        assert refused.outcome is RequestOutcome.CONNECT
        assert "certificate verify failed" in refused.why
        known = url.replace("127.0.0.1", "localhost")
        assert ask(known, "/ok", ca=certificate).ends[0].outcome is RequestOutcome.OK


def test_a_server_that_speaks_http2_only_is_named(server):
    """Its first frame is no answer; over TLS it takes no other protocol in the handshake."""
    assert ask(server.url, "/http2").ends[0].why == HTTP2

    def refused(_):
        raise ssl.SSLError(1, "[SSL] tlsv1 alert no application protocol (_ssl.c:1006)")

    url = server.url.replace("http:", "https:")
    (end,) = ask(url, "/ok", dialler=dialling(url, refused)).ends
    assert (end.outcome, end.why) == (RequestOutcome.CONNECT, HTTP2)
