"""Peers on the TCP fabric that send garbage, half a frame or the wrong key: disconnected, and logged."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from plait_fabric import AuthFailed, FabricOptions, PeerLost, ProtocolViolation, RecvTimeout, connect, listen
from plait_fabric.transport import tcp
from plait_fabric.transport.frames import FrameKind, pack_head, pack_lengths
from plait_fabric.values import Address
from suites.fabric_channel import SECRET, WAIT_S, eventually
from suites.fabric_raw import RawEnds, raw_ends

STALL_S = 0.8
FRAME = pack_head(FrameKind.MESSAGE, b'{"n":1}', pack_lengths([9]), buffers=1, payload_bytes=9) + b"the bytes"


@pytest.fixture
def ends() -> Iterator[RawEnds]:
    """A client that may send anything, and a server with little patience."""
    with raw_ends("tcp", FabricOptions(stall_timeout_s=STALL_S)) as ends:
        yield ends


@pytest.mark.parametrize("cut", [1, 23, 24, 30, len(FRAME) - 1])
def test_half_a_frame_and_silence(ends: RawEnds, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever a frame stops, the peer is cut off after the time-out, also while it is waited for without one."""
    ends.send(FRAME[:cut])
    with pytest.raises(ProtocolViolation, match="part of a frame"):
        ends.server.recv(None)
    assert ends.server.closed
    assert "cut off" in caplog.text
    with pytest.raises(PeerLost):
        ends.client.recv(WAIT_S)


def test_short_looks_do_not_excuse_a_stall(ends: RawEnds) -> None:
    """A receiver that only looks now and then finds the stall too: the time-out counts from the last byte."""
    ends.send(FRAME[:30])
    with pytest.raises(ProtocolViolation):
        for _ in range(1_000):
            try:
                ends.server.recv(0.01)
            except RecvTimeout:
                continue


def test_a_slow_peer_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that dribbles in, longer than the time-out in all, arrives; silence between frames is no stall."""
    now_s = [0.0]
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with raw_ends("tcp", FabricOptions(stall_timeout_s=1.0)) as ends, ThreadPoolExecutor(1) as threads:
        for _ in range(2):
            waiting = threads.submit(ends.server.recv, WAIT_S)
            for start in range(0, len(FRAME), 10):
                now_s[0] += 0.5
                ends.send(FRAME[start : start + 10])
                time.sleep(0.02)  # for the receiver to see that this was not all
            with waiting.result(WAIT_S) as message:
                assert bytes(message.buffers[0]) == b"the bytes"
            now_s[0] += 10.0
        assert not ends.server.closed


def test_garbage_is_logged_once(ends: RawEnds, caplog: pytest.LogCaptureFixture) -> None:
    """Garbage from an authenticated peer ends the channel with one line in the log that names the peer."""
    ends.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for _ in range(2):
        with pytest.raises(ProtocolViolation):
            ends.server.recv(WAIT_S)
    lines = [record.getMessage() for record in caplog.records if "cut off" in record.getMessage()]
    assert len(lines) == 1
    assert ends.server.peer in lines[0]


def test_the_wrong_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A peer with another key is refused, told so, and logged; so is one that stops in mid-handshake."""
    options = FabricOptions(handshake_timeout_s=STALL_S)
    caplog.set_level(logging.WARNING)
    with listen("tcp://127.0.0.1:0", secret=SECRET) as listener, pytest.raises(AuthFailed):
        connect(listener.address, secret=SECRET[::-1], timeout_s=WAIT_S)
    with listen("tcp://127.0.0.1:0", secret=SECRET, options=options) as listener:
        address = Address.parse(listener.address)
        with socket.create_connection((address.target, address.port)) as half:
            half.send(b"half a hands")
            assert eventually(lambda: listener.rejected == 1)
    assert "dropped a connection" in caplog.text
    assert "no handshake within" in caplog.text
