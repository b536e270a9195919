"""The three channels of the fabric under its conformance suites; adding one is one fixture."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plait_fabric import (
    Channel,
    FabricOptions,
    FrameTooLarge,
    PeerLost,
    ProtocolViolation,
    RecvTimeout,
    SendTimeout,
    connect,
    listen,
)
from plait_fabric.memory.ring import MAX_RELEASES
from plait_fabric.memory.segment import map_segment
from plait_fabric.transport.frames import FrameKind, pack_head, pack_lengths, pack_places
from suites.fabric_channel import SECRET, WAIT_S, ChannelConformance
from suites.fabric_listener import ListenerConformance, ProcessConformance
from suites.fabric_raw import raw_ends
from suites.fabric_tensors import TensorConformance


def _mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:plait-fabric")


class TestInproc(ChannelConformance, TensorConformance, ListenerConformance):
    """Leases handed over between threads."""

    scheme = "inproc"
    shares_memory = True


class TestShm(ChannelConformance, TensorConformance, ListenerConformance, ProcessConformance):
    """Shared memory between processes."""

    scheme = "shm"
    shares_memory = True

    def test_releases_of_what_was_never_sent(self) -> None:
        """A peer that says so of every number gains nothing: its window still closes, and each release counts once."""
        with raw_ends("shm", FabricOptions(in_flight_messages=2)) as ends:
            for number in range(MAX_RELEASES):
                ends.server._reader.release(number)  # type: ignore[attr-defined]
            for _ in range(2):
                ends.client.send({}, [bytes(20_000)], timeout_s=0.0)
            with pytest.raises(SendTimeout):
                ends.client.send({}, [bytes(20_000)], timeout_s=0.0)
            assert ends.client.pool.statistics().leases == 2
            ends.server.recv(WAIT_S).release()
            assert ends.client.pool.statistics().leases == 1
            ends.client.send({}, [bytes(20_000)], timeout_s=0.0)
            assert ends.client.pool.statistics().leases == 2

    def test_a_number_that_cannot_be_released(self) -> None:
        """A message whose release has no place to be told in is refused before its reader has it."""
        table = pack_places(MAX_RELEASES, [(0, 9)])
        with raw_ends("shm") as ends:
            ends.send(pack_head(FrameKind.SHARED, b"{}", table, buffers=1, payload_bytes=9))
            with pytest.raises(ProtocolViolation, match="number"):
                ends.server.recv(WAIT_S)
            assert ends.server.closed

    def test_nothing_stays_mapped(self, address: str) -> None:
        """A closed channel that nobody refers to keeps no segment mapped, also without the collector."""
        gc.collect()
        gc.disable()
        try:
            before = _mapped_segments()
            for _ in range(5):
                with (
                    listen(address, secret=SECRET) as listener,
                    connect(listener.address, secret=SECRET) as client,
                    listener.accept(WAIT_S) as server,
                ):
                    client.send({}, [bytes(50_000)])
                    server.recv(WAIT_S).release()
                    client.send({}, [bytes(50_000)])
                    assert _mapped_segments() > before
                del client, server, listener
            assert _mapped_segments() <= before
        finally:
            gc.enable()


class TestTcp(ChannelConformance, TensorConformance, ListenerConformance, ProcessConformance):
    """TCP over loopback."""

    scheme = "tcp"

    def test_timeout_in_mid_frame(self) -> None:
        """A time-out between two halves of a frame loses nothing: the next `recv` has it whole. Of a peer that dies in
        mid-frame the half is never seen."""
        payload = bytes(range(200))
        head = pack_head(FrameKind.MESSAGE, b'{"n":1}', pack_lengths([200]), buffers=1, payload_bytes=200)
        with raw_ends("tcp") as ends:
            for cut in (5, len(head) - 3, len(head) + 50):
                ends.send((head + payload)[:cut])
                with pytest.raises(RecvTimeout):
                    ends.server.recv(0.02)
                ends.send((head + payload)[cut:])
                with ends.server.recv(WAIT_S) as message:
                    assert (message.header, bytes(message.buffers[0])) == ({"n": 1}, payload)
            ends.send(head[:-2])
            ends.sock.shutdown(socket.SHUT_WR)
            with pytest.raises(PeerLost):
                ends.server.recv(WAIT_S)

    def test_message_larger_than_the_receivers_pool(self, address: str) -> None:
        """What can never fit into the receiver's pool ends the channel instead of hanging it."""
        with (
            listen(address, secret=SECRET, options=FabricOptions(pool_bytes=65_536)) as listener,
            connect(listener.address, secret=SECRET) as client,
            listener.accept(WAIT_S) as server,
        ):
            client.send({}, [bytes(100_000)])
            with pytest.raises(FrameTooLarge) as caught:
                server.recv(WAIT_S)
            assert not caught.value.channel_usable
            assert server.closed

    def test_sending_allocates_nothing(self, ends: tuple[Channel, Channel]) -> None:
        """A large send reads the caller's memory: this process allocates next to nothing for it."""
        payload = bytes(32 << 20)
        with ThreadPoolExecutor(1) as threads:
            received = threads.submit(ends[1].recv, WAIT_S)
            tracemalloc.start()
            try:
                ends[0].send({}, [payload])
                _, peak_bytes = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            with received.result(WAIT_S) as message:
                assert message.buffers[0] == payload
        assert peak_bytes < 1 << 20
        assert ends[0].statistics().copies == 0


def test_segments_of_strangers_are_refused(tmp_path: Path) -> None:
    """Only a memfd whose size is sealed gets mapped: anything else could be cut off under our feet."""
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    for descriptor in (unsealed, file):
        with pytest.raises(ProtocolViolation):
            map_segment(descriptor)
        os.close(descriptor)


def test_bytes_need_no_torch() -> None:
    """A process that moves bytes or serves calls imports neither torch nor ray, and knows none of its users."""
    code = (
        "import sys, plait_fabric\n"
        "from plait_fabric.rpc import client, fields, server\n"
        "print(*{'torch', 'ray', 'pytest', 'plait', 'plait_disagg', 'plait_serving'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "\n"
