"""Peers on the TCP fabric that send garbage, half a frame or the wrong key: disconnected, and logged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from plait_fabric import FabricOptions, PeerLost, ProtocolViolation, RecvTimeout
from plait_fabric.transport import tcp
from plait_fabric.transport.frames import FrameKind, pack_head, pack_lengths
from suites.fabric_channel import WAIT_S
from suites.fabric_raw import RawEnds, raw_ends

STALL_S = 0.1
"""Nothing here has to be done within it."""
FRAME = pack_head(FrameKind.MESSAGE, b'{"n":1}', pack_lengths([9]), buffers=1, payload_bytes=9) + b"the bytes"


@pytest.fixture
def ends() -> Iterator[RawEnds]:
    """A client that may send anything, and a server with little patience."""
    with raw_ends("tcp", FabricOptions(stall_timeout_s=STALL_S)) as ends:
        yield ends


@pytest.mark.parametrize("cut", [1, 23, 24, 30, len(FRAME) - 1])
def test_half_a_frame_and_silence(ends: RawEnds, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever a frame stops, the peer is cut off after the time-out, also while it is waited for without one; and
    logged by its name, once."""
    ends.send(FRAME[:cut])
    for _ in range(2):
        with pytest.raises(ProtocolViolation, match="part of a frame"):
            ends.server.recv(None)
    assert ends.server.closed
    (line,) = [record.getMessage() for record in caplog.records if "cut off" in record.getMessage()]
    assert ends.server.peer in line
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
