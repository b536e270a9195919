"""The ring of packets in shared memory: order, room, waking, and peers that write nonsense into it."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_fabric import FabricOptions, connect, listen
from plait_fabric.errors import ProtocolViolation
from plait_fabric.memory.ring import RingReader, RingWriter, ring_bytes
from plait_fabric.transport import shm
from suites.fabric_channel import SECRET, WAIT_S

PAGE, SIZE = 4096, 512


def _ends() -> tuple[bytearray, RingWriter, RingReader]:
    memory = bytearray(PAGE + SIZE)
    writer = RingWriter(memoryview(memory))
    return memory, writer, RingReader(memoryview(memory))


def _room(nbytes: int) -> int:
    return 8 + (nbytes + 7) // 8 * 8


@given(st.lists(st.one_of(st.integers(0, SIZE), st.none()), max_size=80))
def test_packets_come_out_as_they_went_in(steps: list[int | None]) -> None:
    """Any mix of puts and takes is a queue; a put is refused only while what waits leaves too little room."""
    _, writer, reader = _ends()
    waiting: deque[bytes] = deque()
    for number, nbytes in enumerate(steps):
        if nbytes is None:
            assert reader.ready() is bool(waiting)
            assert reader.take() == (waiting.popleft() if waiting else None)
            continue
        packet = bytes([number % 251]) * nbytes
        cut = nbytes // 3
        if writer.put(packet[:cut], [memoryview(packet)[cut:]]):
            waiting.append(packet)
        else:
            held = [_room(len(one)) for one in waiting]
            # Up to as much as a packet takes is left empty where it started over: one that waits, or this one.
            assert sum(held) + max(held, default=0) + 2 * _room(nbytes) > SIZE
    while waiting:
        assert reader.take() == waiting.popleft()
    assert reader.take() is None


def test_every_packet_fits_an_empty_ring() -> None:
    """A ring made for packets of a size takes one wherever the last one ended."""
    largest = 200_000
    memory = memoryview(bytearray(ring_bytes(largest)))
    writer, reader = RingWriter(memory), RingReader(memory)
    for nbytes in (1, largest, 77_777, largest, 8, largest, largest):
        assert writer.put(bytes(nbytes))
        taken = reader.take()
        assert taken is not None
        assert len(taken) == nbytes


@given(st.data())
def test_nonsense_in_the_ring_is_a_violation(data: st.DataObject) -> None:
    """Whatever a peer writes into the shared words, a take gives bytes of the ring, nothing, or a violation."""
    memory, writer, reader = _ends()
    for _ in range(data.draw(st.integers(0, 5))):
        writer.put(bytes(data.draw(st.integers(0, 60))))
    words = memoryview(memory).cast("Q")
    number = st.one_of(st.integers(0, 2 * SIZE), st.integers(0, 2**64 - 1), st.just(2**64 - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        words[data.draw(st.sampled_from([0, 8, 32, *range(PAGE // 8, (PAGE + SIZE) // 8)]))] = data.draw(number)
    for _ in range(6):
        try:
            packet = reader.take()
        except ProtocolViolation:
            break
        assert packet is None or len(packet) <= SIZE


@pytest.mark.parametrize("size", [0, 7, SIZE + 8, 2**63])
def test_a_segment_without_a_ring_is_refused(size: int) -> None:
    """A size that is not one, or leaves the segment, is found before anything is read."""
    memory = bytearray(PAGE + SIZE)
    memoryview(memory).cast("Q")[4] = size
    with pytest.raises(ProtocolViolation):
        RingReader(memoryview(memory))
    with pytest.raises(ProtocolViolation):
        RingReader(memoryview(bytearray(100)))


@pytest.mark.parametrize("spin_s", [0.0, 2e-5])
def test_no_wake_up_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spin_s: float) -> None:
    """Thousands of round trips between sleepers, none of which may look by itself: each is woken every time."""
    monkeypatch.setattr(shm, "_LOOK_S", WAIT_S)
    options = FabricOptions(spin_s=spin_s)
    with (
        listen(f"shm://{tmp_path}/s", secret=SECRET, options=options) as listener,
        connect(listener.address, secret=SECRET, options=options) as client,
        listener.accept(WAIT_S) as server,
    ):
        count = 2_000

        def echo() -> None:
            for _ in range(count):
                with server.recv(WAIT_S / 2) as message:
                    server.send(message.header)

        thread = threading.Thread(target=echo)
        thread.start()
        for number in range(count):
            client.send({"n": number})
            with client.recv(WAIT_S / 2) as message:
                assert message.header == {"n": number}
        thread.join(WAIT_S)
        assert not thread.is_alive()
