"""The conformance suites of the fabric: what every channel guarantees, as importable test classes.

To check an implementation, subclass and name its scheme, or override the fixture `address`::

    class TestTcp(ChannelConformance, TensorConformance, ListenerConformance, ProcessConformance):
        scheme = "tcp"

`ChannelConformance` and `TensorConformance` (in `fabric_tensors`) are for every channel; wrappers
override `wrap`. `fabric_listener` has the other two: `ListenerConformance` for transports that listen,
`ProcessConformance` for those that join processes (peers killed with -9, unauthenticated clients, garbage).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from plait_fabric.endpoints import connect, listen
from plait_fabric.errors import (
    BadHeader,
    ChannelClosed,
    FrameTooLarge,
    LeaseMisuse,
    PeerClosed,
    PoolExhausted,
    RecvTimeout,
    SendTimeout,
)
from plait_fabric.protocols import Channel
from plait_fabric.values import FabricOptions, MessageLimits
from support.fabric import new_address
from support.waiting import wait_for

__all__ = ["SECRET", "SMALL", "WAIT_S", "ChannelConformance", "fill"]

SECRET = b"a secret for tests only"
WAIT_S = 60.0
"""Longer than anything here takes, even on a loaded machine."""
SOON_S = 0.05
_ENDLESS: dict[str, object] = {}
_ENDLESS["x"] = _ENDLESS
SMALL = FabricOptions(
    pool_bytes=1 << 20,
    in_flight_messages=8,
    limits=MessageLimits(header_bytes=4096, buffers=16, message_bytes=1 << 21),
)


def fill(channel: Channel) -> None:
    """Send until that fails."""
    while True:
        channel.send({}, [bytes(200_000)])


class ChannelConformance:
    """What every channel guarantees. Each test is one guarantee."""

    scheme: ClassVar[str]

    def wrap(self, channel: Channel) -> Channel:
        """Return what the suite uses instead of `channel`: a hook for wrappers such as a modelled link."""
        return channel

    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        """Return the address to listen at."""
        return new_address(self.scheme, tmp_path)

    @pytest.fixture
    def ends(self, address: str) -> Iterator[tuple[Channel, Channel]]:
        """Yield two connected ends with the default options."""
        with self._connected(address) as both:
            yield both

    @pytest.fixture
    def small_ends(self, address: str) -> Iterator[tuple[Channel, Channel]]:
        """Yield two connected ends with little room."""
        with self._connected(address, SMALL) as both:
            yield both

    @contextmanager
    def _connected(
        self,
        address: str,
        options: FabricOptions = FabricOptions(),  # noqa: B008  # it is frozen
    ) -> Iterator[tuple[Channel, Channel]]:
        options = replace(options, handshake_timeout_s=WAIT_S)  # both ends open here, on a host that may be busy
        with (
            listen(address, secret=SECRET, options=options) as listener,
            connect(listener.address, secret=SECRET, timeout_s=WAIT_S, options=options) as client,
            listener.accept(WAIT_S) as server,
        ):
            yield self.wrap(client), self.wrap(server)

    def test_header_and_buffers_arrive(self, ends: tuple[Channel, Channel]) -> None:
        """A message arrives with its header and its buffers, bit for bit; it may have none of either. Both sides count
        it, and its bytes."""
        client, server = ends
        header = {"step": 3, "names": ["a", "ü\ud800"], "scale": 0.5}
        for given, buffers in ((header, [b"one", bytearray(b""), memoryview(b"three")]), ({}, [])):
            client.send(given, buffers)
            with server.recv(WAIT_S) as message:
                assert message.header == given
                assert [bytes(buffer) for buffer in message.buffers] == [bytes(buffer) for buffer in buffers]
        sent, received = client.statistics(), server.statistics()
        assert (sent.messages_sent, sent.bytes_sent) == (2, 8)
        assert (received.messages_received, received.bytes_received, received.open_messages) == (2, 8, 0)

    def test_order_and_both_directions(self, ends: tuple[Channel, Channel]) -> None:
        """Messages keep their order in both directions, whatever their sizes."""
        for sender, receiver in (ends, ends[::-1]):
            sizes = [0, 1, 63, 64, 65, 5_000, 20_000, 3, 100_001, 0, 7]
            for number, nbytes in enumerate(sizes):
                sender.send({"number": number}, [bytes([number]) * nbytes])
            for number, nbytes in enumerate(sizes):
                with receiver.recv(WAIT_S) as message:
                    assert message.header["number"] == number
                    assert bytes(message.buffers[0]) == bytes([number]) * nbytes

    def test_sender_may_change_its_bytes_at_once(self, ends: tuple[Channel, Channel]) -> None:
        """Bytes that are not a lease belong to the caller again when `send` returns."""
        for nbytes in (100, 50_000):
            mine = bytearray(b"a" * nbytes)
            ends[0].send({}, [mine])
            mine[:] = b"b" * nbytes
            with ends[1].recv(WAIT_S) as message:
                assert bytes(message.buffers[0]) == b"a" * nbytes

    def test_big_message(self, ends: tuple[Channel, Channel]) -> None:
        """64 MiB in one message arrive complete while the peer receives."""
        payload = memoryview(os.urandom(1 << 20) * 64)
        with ThreadPoolExecutor(1) as threads:
            sent = threads.submit(ends[0].send, {"big": True}, [payload])
            with ends[1].recv(WAIT_S) as message:
                assert message.buffers[0] == payload
            sent.result(WAIT_S)

    def test_many_small_messages_with_two_threads(self, ends: tuple[Channel, Channel]) -> None:
        """One thread sends while another receives on the same end; nothing is lost or reordered."""
        client, server = ends
        count = 300

        def send_all() -> None:
            for number in range(count):
                client.send({"n": number}, [number.to_bytes(8, "big")])

        def echo_all() -> None:
            for _ in range(count):
                with server.recv(WAIT_S) as message:
                    server.send(message.header, message.buffers)

        with ThreadPoolExecutor(2) as threads:
            jobs = [threads.submit(send_all), threads.submit(echo_all)]
            for number in range(count):
                with client.recv(WAIT_S) as message:
                    assert message.header == {"n": number}
                    assert int.from_bytes(message.buffers[0], "big") == number
            for job in jobs:
                job.result(WAIT_S)

    def test_lease_belongs_to_the_channel_after_send(self, ends: tuple[Channel, Channel]) -> None:
        """Once sent, even when the send fails, a lease can be neither written, released nor sent."""
        lease = ends[0].pool.acquire(100)
        ends[0].send({}, [lease])
        for misuse in (lease.release, lambda: lease.write(b"x"), lambda: ends[0].send({}, [lease])):
            with pytest.raises(LeaseMisuse):
                misuse()
        with pytest.raises(BadHeader):
            ends[0].send({"x": math.nan}, [failed := ends[0].pool.acquire(5)])
        assert not failed.live
        ends[1].recv(WAIT_S).release()
        wait_for(lambda: ends[0].pool.statistics().leases == 0)

    def test_what_is_kept_outlives_the_release(self, ends: tuple[Channel, Channel]) -> None:
        """Small and large payloads alike: other messages do not change it, and it may be written to."""
        kept = []
        for number, nbytes in enumerate((0, 10, 5_000, 50_000)):
            ends[0].send({}, [bytes([number]) * nbytes, b"tail"])
            with ends[1].recv(WAIT_S) as message:
                kept.append(message.keep())
        for nbytes in (10, 5_000, 50_000):
            ends[0].send({}, [bytes([255]) * nbytes, b"head"])
            ends[1].recv(WAIT_S).release()
        for number, (payload, tail) in enumerate(kept):
            assert set(payload) <= {number}
            assert tail == b"tail"
            tail[0] = 0

    def test_slow_receiver_bounds_the_sender(self, small_ends: tuple[Channel, Channel]) -> None:
        """A peer that does not receive stops the sender; memory stays bounded, and it resumes."""
        client, server = small_ends

        def fill() -> None:
            while client.statistics().messages_sent < 1_000:
                client.send({"n": client.statistics().messages_sent}, [bytes(60_000)], timeout_s=0.2)

        with pytest.raises(SendTimeout) as caught:
            fill()
        assert caught.value.channel_usable is not client.closed
        sent = client.statistics().messages_sent
        assert 1 <= sent < 1_000
        assert client.statistics().send_waits >= 1
        assert client.pool.statistics().peak_leased_bytes <= SMALL.pool_bytes
        if client.closed:
            return  # a stream was torn in mid-frame and said so; nothing to resume
        for number in range(sent):
            with server.recv(WAIT_S) as message:
                assert message.header == {"n": number}
        client.send({"n": "again"}, timeout_s=WAIT_S)
        assert server.recv(WAIT_S).header == {"n": "again"}

    def test_held_messages_stop_the_sender_and_release_resumes(self, small_ends: tuple[Channel, Channel]) -> None:
        """A sender that waits for the receiver to release continues as soon as it does."""
        client, server = small_ends
        with ThreadPoolExecutor(1) as threads:

            def send_many() -> None:
                for number in range(20):
                    client.send({"n": number}, [bytes(200_000)])

            sent = threads.submit(send_many)
            held = [server.recv(WAIT_S)]
            for number in range(1, 20):
                held.append(server.recv(WAIT_S))
                assert held[-1].header["n"] == number
                if len(held) == 3:
                    held.pop(0).release()
            sent.result(WAIT_S)

    def test_everything_may_be_held_and_released_at_once(self, ends: tuple[Channel, Channel]) -> None:
        """A receiver may hold a whole window and release it, each message once, while the sender does nothing."""
        client, server = ends
        window = FabricOptions().in_flight_messages
        for number in range(window):
            client.send({"n": number}, [bytes(9_000)], timeout_s=WAIT_S)
        held = [server.recv(WAIT_S) for _ in range(window)]
        assert server.statistics().open_messages == window
        for message in reversed(held):
            message.release()
        for misuse in (held[0].release, lambda: held[0].buffers):
            with pytest.raises(LeaseMisuse):
                misuse()
        client.send({"n": "next"}, [bytes(9_000)], timeout_s=WAIT_S)
        with server.recv(WAIT_S) as message:
            assert message.header == {"n": "next"}

    def test_recv_timeout_leaves_the_channel_usable(self, ends: tuple[Channel, Channel]) -> None:
        """After a timeout, even of zero seconds, the next message arrives complete."""
        for timeout_s in (0.0, 0.01):
            with pytest.raises(RecvTimeout) as caught:
                ends[1].recv(timeout_s)
            assert caught.value.channel_usable
        ends[0].send({"n": 1}, [b"payload"])
        assert bytes(ends[1].recv(WAIT_S).buffers[0]) == b"payload"
        assert ends[1].statistics().recv_waits >= 1

    def test_too_large_is_refused_before_sending(self, small_ends: tuple[Channel, Channel]) -> None:
        """A header, a buffer count or a payload over the limit is rejected and nothing is sent; nor does a lease that
        never fits wait."""
        client, server = small_ends
        for header, buffers in (({"x": "y" * 5_000}, []), ({}, [b""] * 17), ({}, [bytes(1 << 22)])):
            with pytest.raises(FrameTooLarge) as caught:
                client.send(header, buffers)
            assert caught.value.channel_usable
        with pytest.raises(PoolExhausted):
            client.pool.acquire(SMALL.pool_bytes + 1, None)
        client.send({"n": 1})
        assert server.recv(WAIT_S).header == {"n": 1}

    @pytest.mark.parametrize("header", [{"x": {1, 2}}, {"x": math.inf}, {3: 4}, ["no", "object"], _ENDLESS], ids=str)
    def test_bad_header_is_refused(self, ends: tuple[Channel, Channel], header: object) -> None:
        """A header that is not strict JSON is rejected and nothing is sent."""
        with pytest.raises(BadHeader):
            ends[0].send(header)  # type: ignore[arg-type]
        ends[0].send({})
        assert ends[1].recv(WAIT_S).header == {}

    def test_close_wakes_recv_on_both_sides(self, ends: tuple[Channel, Channel]) -> None:
        """A waiting `recv` ends at once: `ChannelClosed` here, `PeerClosed` there; closing twice is fine."""
        client, server = ends
        with ThreadPoolExecutor(2) as threads:
            here: Future[object] = threads.submit(client.recv, WAIT_S)
            there: Future[object] = threads.submit(server.recv, WAIT_S)
            time.sleep(SOON_S)
            client.close()
            client.close()
            assert isinstance(here.exception(WAIT_S / 2), ChannelClosed)
            assert isinstance(there.exception(WAIT_S / 2), PeerClosed)
        assert client.closed
        for call in (lambda: client.send({}), lambda: client.recv(0.0)):
            with pytest.raises(ChannelClosed):
                call()
        with pytest.raises(PeerClosed):
            server.recv(0.0)

    def test_close_wakes_a_waiting_sender(self, small_ends: tuple[Channel, Channel]) -> None:
        """A `send` that waits for the peer ends when either side closes."""
        client, server = small_ends
        with ThreadPoolExecutor(1) as threads:
            filling = threads.submit(fill, client)
            wait_for(lambda: client.statistics().send_waits > 0)
            server.close()
            assert isinstance(filling.exception(WAIT_S), Exception)
        assert client.closed

    def test_what_was_sent_before_close_arrives(self, ends: tuple[Channel, Channel]) -> None:
        """Messages that had been sent arrive first, then the error that the peer is closed."""
        ends[0].send({"n": 1}, [b"x" * 50_000])
        ends[0].send({"n": 2}, [b"y" * 10])
        wait_for(lambda: ends[0].statistics().messages_sent == 2)
        time.sleep(SOON_S)
        ends[0].close()
        with ends[1].recv(WAIT_S) as message:
            assert bytes(message.buffers[0]) == b"x" * 50_000
        assert bytes(ends[1].recv(WAIT_S).buffers[0]) == b"y" * 10
        with pytest.raises(PeerClosed):
            ends[1].recv(WAIT_S)
