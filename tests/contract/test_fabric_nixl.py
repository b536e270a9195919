"""One-sided transfers under the fabric's conformance suites, and what only they have: writes, notes, credit."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from plait_fabric import (
    Channel,
    FabricOptions,
    PeerClosed,
    PeerLost,
    ProtocolViolation,
    RecvTimeout,
    SendTimeout,
    Unsupported,
    connect,
    listen,
)
from plait_fabric.transport.frames import FrameKind, pack_head, pack_places
from suites.fabric_channel import SECRET, SMALL, WAIT_S, ChannelConformance
from suites.fabric_listener import ListenerConformance, ProcessConformance
from suites.fabric_raw import RawEnds, raw_ends
from suites.fabric_tensors import TensorConformance
from support.waiting import wait_for

ADDRESS = "nixl://127.0.0.1:0"
ONE_SIDED = replace(SMALL, one_sided_from_bytes=1)
TRANSPORTS = {"tcp": "tcp", "best": ""}
ANNOUNCEMENT = pack_head(FrameKind.SHARED, b"{}", pack_places(1, [(0, 9)]), buffers=1, payload_bytes=9)
"""Of a message of nine bytes that is not written."""


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NIXL is not installed, both ends say so and name the extra."""
    for name in [name for name in sys.modules if name.startswith("nixl_cu12.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    for call in (listen, connect):
        with pytest.raises(Unsupported, match=r"plait\[nixl\]"):
            call(ADDRESS, secret=SECRET)


@pytest.fixture
def library() -> None:
    """NIXL, or a skip."""
    pytest.importorskip("nixl_cu12", reason="needs NIXL: make setup-nixl")


@pytest.mark.usefixtures("library")
class TestNixl(ChannelConformance, TensorConformance, ListenerConformance, ProcessConformance):
    """Small messages by the socket, large ones by whatever UCX finds on this machine."""

    scheme = "nixl"

    def test_transports_that_do_not_exist(self) -> None:
        """Transports that UCX cannot start with are an error that names them."""
        options = FabricOptions(nixl_transport="carrier_pigeon")
        with listen(ADDRESS, secret=SECRET) as listener, pytest.raises(Unsupported, match="carrier_pigeon"):
            connect(listener.address, secret=SECRET, options=options)


@pytest.fixture(params=TRANSPORTS)
def raw(library: None, request: pytest.FixtureRequest) -> Iterator[RawEnds]:
    """Two ends that write every message, over TCP and over the best that there is."""
    with raw_ends("nixl", replace(ONE_SIDED, nixl_transport=TRANSPORTS[request.param])) as made:
        yield made


@pytest.fixture
def ends(raw: RawEnds) -> tuple[Channel, Channel]:
    """The same, where messages are all that is sent."""
    return raw.client, raw.server


def test_written_messages_arrive_in_order(ends: tuple[Channel, Channel]) -> None:
    """Messages of any size and number of buffers, leases among them, arrive bit for bit and in order, both ways."""
    for sender, receiver in (ends, ends[::-1]):
        with ThreadPoolExecutor(1) as threads:

            def send_all(sender: Channel = sender) -> None:
                for number, nbytes in enumerate((1, 65, 100_001, 7, 300_000)):
                    lease = sender.pool.acquire(nbytes)
                    lease.write(bytes([number]) * nbytes)
                    sender.send({"number": number}, [b"head", lease, b"", bytes([number]) * 3])
                sender.send({"number": "last"})

            sent = threads.submit(send_all)
            for number, nbytes in enumerate((1, 65, 100_001, 7, 300_000)):
                with receiver.recv(WAIT_S) as message:
                    assert message.header == {"number": number}
                    got = [bytes(buffer) for buffer in message.buffers]
                    assert got == [b"head", bytes([number]) * nbytes, b"", bytes([number]) * 3]
            assert receiver.recv(WAIT_S).header == {"number": "last"}
            sent.result(WAIT_S)
        wait_for(lambda sender=sender: sender.pool.statistics().leases == 0)  # type: ignore[misc]


def test_a_window_of_unreleased_messages_stops_the_sender(ends: tuple[Channel, Channel]) -> None:
    """Without a release the sender is stopped by its window and the peer's memory, and goes on after one."""
    client, server = ends
    with ThreadPoolExecutor(1) as threads:
        for _ in range(ONE_SIDED.in_flight_messages):
            sent = threads.submit(client.send, {}, [bytes(1_000)])
            held = server.recv(WAIT_S)
            sent.result(WAIT_S)
        with pytest.raises(SendTimeout) as caught:
            client.send({}, [bytes(1_000)], timeout_s=0.05)
        assert caught.value.channel_usable
        held.release()
        sent = threads.submit(client.send, {"n": 1}, [bytes(1_000)])
        with server.recv(WAIT_S) as message:
            assert message.header == {"n": 1}
        sent.result(WAIT_S)


def test_an_announced_message_survives_a_timeout(raw: RawEnds) -> None:
    """A receiver that gives up before the bytes are there gets the message whole the next time."""
    client, server = raw.client, raw.server
    raw.send(ANNOUNCEMENT)
    with pytest.raises(RecvTimeout):
        server.recv(0.02)
    raw.notify_server(b"w" + (1).to_bytes(8, "big"))
    with ThreadPoolExecutor(1) as threads:  # over TCP a note leaves when somebody makes progress
        sending = threads.submit(
            wait_for, lambda: bool(client.pool.statistics() and server.statistics().messages_received)
        )
        with server.recv(WAIT_S) as message:
            assert message.header == {}
        sending.result(WAIT_S)


def test_announced_and_gone(raw: RawEnds) -> None:
    """A peer that hangs up in the middle of a message is lost; the half is never seen."""
    server = raw.server
    raw.send(ANNOUNCEMENT)
    raw.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerLost) as caught:
        server.recv(WAIT_S)
    assert not isinstance(caught.value, PeerClosed)
    with pytest.raises(PeerLost):
        server.send({}, [bytes(1_000)])


@pytest.mark.parametrize("note", [b"short", b"x" + bytes(8), b"r" + bytes(7) + b"\x09"], ids=["short", "kind", "id"])
def test_wrong_notes(raw: RawEnds, note: bytes) -> None:
    """A peer whose notes make no sense is cut off."""
    client, server = raw.client, raw.server
    raw.notify_client(note)
    with ThreadPoolExecutor(1) as threads:  # a note leaves when somebody makes progress
        progress = threads.submit(wait_for, lambda: bool(server.pool.statistics()) and client.closed)
        with pytest.raises(ProtocolViolation, match="note"):
            client.recv(WAIT_S)
        progress.result(WAIT_S)
    with pytest.raises(ProtocolViolation):
        client.send({}, [bytes(1_000)])
