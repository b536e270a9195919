"""Conformance of listeners, and of channels between processes; see `fabric_channel`."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from plait_bench.fabric.peer import echo, spawned_peer
from plait_fabric.endpoints import connect, listen
from plait_fabric.errors import (
    AcceptTimeout,
    AddressInUse,
    AuthFailed,
    ChannelClosed,
    ConnectTimeout,
    FabricError,
    FrameTooLarge,
    PeerLost,
    ProtocolViolation,
    Unreachable,
    WeakSecret,
)
from plait_fabric.transport.acceptor import Listener
from plait_fabric.transport.frames import FrameKind, pack_head
from plait_fabric.transport.greeting import CHALLENGE_BYTES, RESPONSE_BYTES
from plait_fabric.values import Address, FabricOptions
from suites.fabric_channel import SECRET, SOON_S, WAIT_S, fill
from suites.fabric_raw import flood, hold, raw_ends
from support.waiting import wait_for

__all__ = ["ListenerConformance", "ProcessConformance"]

_OTHERS_FILES = ("plasma", "torch_", "sem.", "__KMP", "plait-bench-")
"""Files of Ray, torch, OpenMP and a benchmark in /dev/shm, which come and go while other tests run."""


class ListenerConformance:
    """What every listener guarantees. The `address` fixture comes from `ChannelConformance`."""

    def test_accept_timeout_and_close(self, address: str) -> None:
        """`accept` times out, stays usable, and ends when the listener is closed."""
        with listen(address, secret=SECRET) as listener:
            with pytest.raises(AcceptTimeout):
                listener.accept(0.01)
            with ThreadPoolExecutor(1) as threads:
                waiting: Future[object] = threads.submit(listener.accept, WAIT_S)
                time.sleep(SOON_S)
                listener.close()
                assert isinstance(waiting.exception(WAIT_S / 2), ChannelClosed)
            with pytest.raises(ChannelClosed):
                listener.accept(0.0)

    def test_several_channels_from_one_listener(self, address: str) -> None:
        """Channels of one listener are independent, and outlive it."""
        with listen(address, secret=SECRET) as listener:
            clients = [connect(listener.address, secret=SECRET) for _ in range(3)]
            servers = [listener.accept(WAIT_S) for _ in range(3)]
        for number, client in enumerate(clients):
            client.send({"n": number}, [bytes(30_000)])
        for number, server in enumerate(servers):
            with server.recv(WAIT_S) as message:
                assert message.header == {"n": number}
        for channel in (*clients, *servers):
            channel.close()

    def test_wrong_secret_is_refused_on_both_sides(self, address: str) -> None:
        """A peer with another secret gets `AuthFailed`; the listener never returns it and continues."""
        with listen(address, secret=SECRET) as listener:
            with pytest.raises(AuthFailed):
                connect(listener.address, secret=b"another secret, as long", timeout_s=WAIT_S)
            with pytest.raises(AcceptTimeout):
                listener.accept(SOON_S)
            assert listener.rejected == 1
            with connect(listener.address, secret=SECRET, timeout_s=WAIT_S), listener.accept(WAIT_S) as server:
                assert not server.closed

    def test_an_address_is_used_once_and_with_a_secret(self, address: str) -> None:
        """A second listener at an address is rejected; after `close` nobody listens there, which a client hears at
        once, and the address is free again. A secret of fewer than 16 bytes is rejected before anything is opened."""
        for call in (listen, connect):
            with pytest.raises(WeakSecret):
                call(address, secret=b"short")
        with listen(address, secret=SECRET) as listener:
            bound = listener.address
            with pytest.raises(AddressInUse):
                listen(bound, secret=SECRET)
        with pytest.raises(Unreachable):
            connect(bound, secret=SECRET, timeout_s=WAIT_S)
        with listen(bound, secret=SECRET) as listener:
            assert listener.address == bound


class ProcessConformance:
    """What channels between processes guarantee in addition."""

    @pytest.fixture
    def listener(self, address: str) -> Iterator[Listener]:
        """Yield a listener."""
        with listen(address, secret=SECRET) as listener:
            yield listener

    def test_echo_across_processes(self, listener: Listener) -> None:
        """Small and large payloads go to another process and back."""
        with spawned_peer(echo, listener.address, SECRET), listener.accept(WAIT_S) as channel:
            for nbytes in (0, 10, 8_192, 8_193, 3_000_000):
                payload = os.urandom(nbytes)
                channel.send({"nbytes": nbytes}, [payload, b"tail"])
                with channel.recv(WAIT_S) as message:
                    assert [bytes(buffer) for buffer in message.buffers] == [payload, b"tail"]

    def test_killed_peer_wakes_recv_and_leaves_nothing(self, listener: Listener) -> None:
        """kill -9 of the peer ends a waiting `recv` at once with a `PeerLost` that says so; /dev/shm is as before."""
        before = _shared_memory_files()
        with spawned_peer(hold, listener.address, SECRET) as process, listener.accept(WAIT_S) as channel:
            channel.recv(WAIT_S).release()
            with ThreadPoolExecutor(1) as threads:
                waiting: Future[object] = threads.submit(channel.recv, WAIT_S)
                time.sleep(SOON_S)
                process.kill()
                lost = waiting.exception(WAIT_S)
                assert isinstance(lost, PeerLost)
                assert "was killed, probably for memory" in str(lost)
            assert channel.closed
            with pytest.raises(PeerLost):
                channel.send({}, [bytes(100_000)])
        assert _shared_memory_files() <= before

    def test_killed_peer_wakes_a_waiting_sender(self, listener: Listener) -> None:
        """kill -9 of a peer that does not receive ends a waiting `send` with `PeerLost` at once."""
        with (
            spawned_peer(hold, listener.address, SECRET) as process,
            listener.accept(WAIT_S) as channel,
            ThreadPoolExecutor(1) as threads,
        ):
            filling = threads.submit(fill, channel)
            wait_for(lambda: channel.statistics().send_waits > 0)
            process.kill()
            assert isinstance(filling.exception(WAIT_S), PeerLost)

    def test_killed_in_mid_flood(self, listener: Listener) -> None:
        """A peer killed while it sends loses at most what was in flight: no torn message arrives."""
        with spawned_peer(flood, listener.address, SECRET) as process, listener.accept(WAIT_S) as channel:
            for expected in itertools.count():
                try:
                    message = channel.recv(WAIT_S)
                except PeerLost:
                    break
                with message:
                    assert message.header["number"] == expected
                    assert message.buffers[0].nbytes == 1 << 20
                if expected == 20:
                    process.kill()
            assert expected > 20

    def test_unauthenticated_clients_do_not_block_the_listener(
        self, address: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Unauthenticated clients that send garbage or vanish are dropped, which is logged; a valid peer connects
        meanwhile, and beside those that stay silent."""
        options = FabricOptions(handshake_timeout_s=WAIT_S)
        with listen(address, secret=SECRET, options=options) as listener, ExitStack() as open_sockets:
            clients = [open_sockets.enter_context(_dial(listener.address)) for _ in range(5)]
            clients[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
            clients[2].sendall(os.urandom(RESPONSE_BYTES))
            clients[3].sendall(b"\x80\x04\x95")
            clients[4].close()
            with connect(listener.address, secret=SECRET, timeout_s=WAIT_S), listener.accept(WAIT_S):
                pass
            wait_for(lambda: listener.rejected == 2)
            assert caplog.text.count("dropped a connection") == 2

    @pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n"])
    def test_who_does_not_finish_the_handshake_is_dropped(
        self, address: str, said: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        """After its time, which is logged; the client learns it."""
        options = FabricOptions(handshake_timeout_s=SOON_S)
        with listen(address, secret=SECRET, options=options) as listener, _dial(listener.address) as client:
            client.settimeout(WAIT_S)
            assert len(client.recv(CHALLENGE_BYTES)) == CHALLENGE_BYTES
            if said:
                with suppress(OSError):  # on a busy host its time may be over
                    client.sendall(said)
            wait_for(lambda: listener.rejected == 1)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert f"no handshake within {SOON_S} s" in caplog.text

    def test_a_crowd_of_silent_clients(self, address: str) -> None:
        """With more silent clients than places, the oldest are dropped and a valid peer connects at once."""
        options = FabricOptions(handshake_timeout_s=WAIT_S, pending_handshakes=3)
        with listen(address, secret=SECRET, options=options) as listener, ExitStack() as open_sockets:
            for _ in range(8):
                open_sockets.enter_context(_dial(listener.address))
            with connect(listener.address, secret=SECRET, timeout_s=WAIT_S), listener.accept(WAIT_S):
                assert listener.rejected >= 5

    def test_silent_listener_times_out(self, address: str) -> None:
        """Connecting to something that never answers ends with `ConnectTimeout`."""
        with _mute_listener(address) as bound, pytest.raises(ConnectTimeout):
            connect(bound, secret=SECRET, timeout_s=0.1)

    def test_a_listener_without_the_secret_is_found_out(self, address: str) -> None:
        """A listener that cannot prove that it has the secret gets no channel."""
        with listen(address, secret=b"an impostor's secret") as impostor, pytest.raises(AuthFailed):
            connect(impostor.address, secret=SECRET, timeout_s=WAIT_S)

    @pytest.mark.parametrize(
        ("frame", "error"),
        [
            (b"\x80\x04\x95 a pickle, say, and some more", ProtocolViolation),
            (pack_head(FrameKind.MESSAGE, b"", b"", buffers=0, payload_bytes=1 << 60), FrameTooLarge),
            (b"PLT1\x01\x00\x00\x00\xff\xff\xff\xff" + bytes(12), FrameTooLarge),
            (b"PLT1\x09" + bytes(19), ProtocolViolation),
            (pack_head(FrameKind.MESSAGE, b"[" * 60_000, b"", buffers=0, payload_bytes=0), ProtocolViolation),
            (pack_head(FrameKind.MESSAGE, b'{"x":NaN}', b"", buffers=0, payload_bytes=0), ProtocolViolation),
            (pack_head(FrameKind.MESSAGE, b"{}", bytes(8), buffers=1, payload_bytes=99), ProtocolViolation),
            (pack_head(FrameKind.SHARED, b"{}", b"\xff" * 24, buffers=1, payload_bytes=9), ProtocolViolation),
            (pack_head(FrameKind.GOODBYE, b"{}", b"", buffers=0, payload_bytes=0), ProtocolViolation),
        ],
        ids=["pickle", "payload", "header", "kind", "deep", "nan", "sum", "place", "goodbye"],
    )
    def test_garbage_after_the_handshake(self, address: str, frame: bytes, error: type[FabricError]) -> None:
        """An authenticated peer that sends garbage is disconnected before anything is allocated for it."""
        with raw_ends(Address.parse(address).scheme) as ends:
            ends.send(frame)
            with pytest.raises(error) as caught:
                ends.server.recv(WAIT_S)
            assert not caught.value.channel_usable
            assert ends.server.closed
            with pytest.raises(error):
                ends.server.send({})
            with pytest.raises(PeerLost):
                ends.client.recv(WAIT_S)


def _shared_memory_files() -> set[str]:
    folder = Path("/dev/shm")  # looked at, never written to
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if not name.startswith(_OTHERS_FILES)}


def _socket_for(address: Address) -> tuple[socket.socket, Any]:
    if address.scheme == "shm":
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), address.target
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM), (address.target, address.port)


def _dial(text: str) -> socket.socket:
    """Open a bare connection that skips the handshake."""
    sock, target = _socket_for(Address.parse(text))
    sock.connect(target)
    return sock


@contextmanager
def _mute_listener(text: str) -> Iterator[str]:
    """Yield where connections are accepted into a backlog and nothing is ever sent."""
    address = Address.parse(text)
    sock, target = _socket_for(address)
    with sock:
        sock.bind(target)
        sock.listen(8)
        name = sock.getsockname()
        yield f"shm://{name}" if address.scheme == "shm" else f"{address.scheme}://{name[0]}:{name[1]}"
