"""Modelled links: the conformance suites through the wrapper, the two clocks, and what a slower host makes of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from plait_fabric import Channel, ChannelClosed, ProtocolViolation, RecvTimeout, connect, listen
from plait_fabric.errors import BadHeader
from plait_fabric.link.link import Link
from plait_fabric.link.modelled import LinkPort, ModelledChannel, MonotonicClock, modelled
from suites.fabric_channel import SECRET, WAIT_S, ChannelConformance
from suites.fabric_tensors import TensorConformance
from support.fabric_links import shipped, slow_link
from support.waiting import wait_for

LINK, OTHER_LINK = shipped().link, shipped("400g-cross-pod").link
_numbers = itertools.count()


_opened: list[Channel] = []


def pair() -> tuple[Channel, Channel]:
    """Two connected ends in this process, which the test's end closes."""
    with listen(f"inproc://modelled-{next(_numbers)}", secret=SECRET) as listener:
        ends = connect(listener.address, secret=SECRET), listener.accept(WAIT_S)
    _opened.extend(ends)
    return ends


@pytest.fixture(autouse=True)
def _close_pairs() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


class VirtualClock:
    """Time that passes only by waiting, which returns at once."""

    def __init__(self) -> None:
        self.epoch = f"virtual {next(_numbers)}"
        self._now_s = 0.0
        self._lock = threading.Lock()

    def now_s(self) -> float:
        return self._now_s

    def wait_until(self, at_s: float, stop: threading.Event) -> None:
        if not stop.is_set():
            with self._lock:
                self._now_s = max(self._now_s, at_s)

    def advance(self, by_s: float) -> None:
        """As work does."""
        with self._lock:
            self._now_s += by_s


class TestModelledShm(ChannelConformance, TensorConformance):
    """In real time, with a link of the file that ships, over shared memory."""

    scheme = "shm"
    shares_memory = True

    def wrap(self, channel: Channel) -> Channel:
        return modelled(channel, OTHER_LINK)


class TestModelledVirtual(ChannelConformance):
    """In virtual time, over TCP."""

    scheme = "tcp"

    @pytest.fixture(autouse=True)
    def _one_clock(self) -> None:
        self.clock = VirtualClock()

    def wrap(self, channel: Channel) -> Channel:
        return modelled(channel, LINK, clock=self.clock)


Ends = tuple[ModelledChannel, ModelledChannel]


def _virtual(link: Link = LINK) -> tuple[Ends, VirtualClock]:
    clock = VirtualClock()
    one, other = pair()
    return (modelled(one, link, clock=clock), modelled(other, link, clock=clock)), clock


@pytest.mark.parametrize("nbytes", [0, 189, 4_097, 1 << 20])
def test_virtual_time_is_exact(nbytes: int) -> None:
    """In virtual time thirty round trips take sixty times T(n), to the last digits of a float."""
    (client, server), clock = _virtual()
    for _ in range(30):
        client.send({}, [bytes(nbytes)])
        with server.recv(WAIT_S) as message:
            server.send({}, message.buffers)
        with client.recv(WAIT_S) as message:
            assert not message.delivery.host_slower
    assert clock.now_s() == pytest.approx(60 * LINK.one_way_s(nbytes), rel=1e-9)


def test_work_in_virtual_time_adds_up() -> None:
    """What the receiver does between two messages adds to the clock; a message that waited is not late."""
    (client, server), clock = _virtual()
    client.send({}, [bytes(4_096)])
    clock.advance(1.0)
    with server.recv(WAIT_S) as message:
        assert clock.now_s() == 1.0
        assert not message.delivery.host_slower
        assert message.delivery.modelled_s == pytest.approx(LINK.one_way_s(4_096))


def test_a_host_that_is_slower_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host of ours crosses a thread in 0.8 us: the message says modelled, and late, whatever the date says."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    one, other = pair()
    with modelled(one, LINK) as client, modelled(other, LINK) as server, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.recv, WAIT_S)
        wait_for(lambda: server.statistics().recv_waits > 0)
        client.send({}, [b"x" * 32])
        message = waiting.result(WAIT_S)
        assert (message.delivery.kind, message.delivery.link) == ("modelled", LINK.name)
        assert message.delivery.host_slower
        assert message.delivery.late_s > 0


def test_incast_shares_the_receivers_port() -> None:
    """Two senders to one port: the second message is delivered one transfer later; with a port each it is not."""
    nbytes = 1 << 20
    for ports, apart_s in (([LinkPort()] * 2, nbytes / LINK.bytes_per_s), ([LinkPort(), LinkPort()], 0.0)):
        clock = VirtualClock()
        ends = [pair() for _ in range(2)]
        senders = [modelled(one, LINK, clock=clock) for one, _ in ends]
        receivers = [
            modelled(other, LINK, clock=clock, port=port) for (_, other), port in zip(ends, ports, strict=True)
        ]
        for sender in senders:
            sender.send({}, [bytes(nbytes)])
        moments = []
        for receiver in receivers:
            receiver.recv(WAIT_S).release()
            moments.append(clock.now_s())
        assert moments[1] - moments[0] == pytest.approx(apart_s, abs=1e-12)


def test_a_message_is_held_back_and_then_given() -> None:
    """Before its time a message is not there, also for a look without waiting; it is not counted and not lost."""
    (client, server), _ = _virtual(slow_link(alpha_s=1.0))
    client.send({"n": 1}, [bytes(100)])
    with pytest.raises(RecvTimeout):
        server.recv(0.0)
    assert server.statistics().messages_received == server.statistics().open_messages == 0
    with server.recv(WAIT_S) as message:
        assert message.header == {"n": 1}
    assert server.statistics().messages_received == 1
    client.close()
    server.close()


def test_close_wakes_who_waits_for_the_link() -> None:
    """Closing ends a wait for a message that is in flight, and gives its memory back."""
    link = slow_link(bytes_per_s=1e6)
    one, other = pair()
    client, server = modelled(one, link), modelled(other, link)
    client.send({}, [client.pool.acquire(200_000_000)])  # longer than anybody waits here
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.recv, WAIT_S)
        time.sleep(0.05)
        server.close()
        assert isinstance(waiting.exception(WAIT_S), ChannelClosed)
    assert other.statistics().open_messages == 0


class _JumpingClock(MonotonicClock):
    """A clock that breaks its promise."""

    by_s = 0.0

    def now_s(self) -> float:
        return time.monotonic() + self.by_s


def test_a_clock_that_goes_back_is_found_out() -> None:
    """Where a clock runs behind the peer's, the channel ends with a clear error instead of waiting for an hour."""
    one, other = pair()
    ahead, behind = _JumpingClock(), _JumpingClock()
    ahead.by_s = 3_600.0
    client, server = modelled(one, LINK, clock=ahead), modelled(other, LINK, clock=behind)
    client.send({})
    with pytest.raises(ProtocolViolation, match="clock is ahead"):
        server.recv(WAIT_S)
    assert server.closed
    with pytest.raises(ProtocolViolation):
        server.recv(WAIT_S)


@pytest.mark.parametrize(
    "stamp",
    [
        ["token", 0.0, 0.0],
        ["own", "x", 1.0],
        ["own", 1.0, 0.5],
        ["own", float(1 << 60), 1e30],
    ],
    ids=str,
)
def test_bad_stamps_are_violations(stamp: list[object]) -> None:
    """A peer that stamps nonsense is cut off; nobody else may use the key of the stamp."""
    one, other = pair()
    server = modelled(other, LINK)
    with pytest.raises(BadHeader):
        server.send({"_link": 1}, [server.pool.acquire(10)])
    assert server.pool.statistics().leases == 0
    server.send({})
    if stamp[:1] == ["own"]:
        stamp = [one.recv(WAIT_S).header["_link"][0], *stamp[1:]]
    one.send({"_link": stamp}, [bytes(9_000)])
    with pytest.raises(ProtocolViolation):
        server.recv(WAIT_S)
    assert server.closed
    assert one.pool.statistics().leases == 0


def test_both_ends_must_model_the_same_link() -> None:
    """Two ends with different links, or of which one models none, do not talk past each other."""
    for sender, says in ((lambda one: modelled(one, OTHER_LINK), "another link"), (lambda one: one, None)):
        one, other = pair()
        sender(one).send({})
        with pytest.raises(ProtocolViolation, match=says):
            modelled(other, LINK).recv(WAIT_S)
