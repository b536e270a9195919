"""Frames, addresses and the handshake: whatever bytes arrive, the answer is a record or one of our errors."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from plait_fabric import (
    AddressInUse,
    AuthFailed,
    BadAddress,
    FabricError,
    MessageLimits,
    PeerLost,
    PoolExhausted,
    ProtocolViolation,
    listen,
)
from plait_fabric.memory.pool import Lease, Pool
from plait_fabric.transport.frames import (
    PREFIX_BYTES,
    FrameKind,
    FrameReader,
    decode_header,
    encode_header,
    pack_head,
    pack_lengths,
    pack_one,
    pack_places,
    unpack_one,
    unpack_places,
    unpack_prefix,
)
from plait_fabric.transport.greeting import CHALLENGE_BYTES, PROOF_BYTES, RESPONSE_BYTES, authenticate, introduce
from plait_fabric.values import Address, Scheme
from plait_fabric.waiting import Deadline

LIMITS = MessageLimits(header_bytes=2_000, buffers=8, message_bytes=10_000)
SECRET = b"0123456789abcdef"

_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_json = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
headers = st.dictionaries(st.text(), _json, max_size=5)


@given(headers)
@example({"x": 2**70, "y": -(2**64), "z": "\ud800", "null": None})  # what a quick parser would spoil
def test_headers_survive(header: dict[str, object]) -> None:
    """Any JSON object comes back equal, with its types."""
    assert json.dumps(decode_header(encode_header(header))) == json.dumps(header)


@given(st.binary(max_size=200))
@example(b"[1]")
@example(b"[" * 100_000)
@example(b'{"x":1e999}')
@example(b'{"x":' + b"9" * 5_000 + b"}")
def test_any_header_bytes_are_an_object_or_a_violation(data: bytes) -> None:
    """Header bytes from a peer parse to a dict or raise `ProtocolViolation`, nothing else."""
    with contextlib.suppress(ProtocolViolation):
        assert isinstance(decode_header(data), dict)


@given(st.lists(st.integers(0, 1_000), max_size=8), st.integers(0, 9), st.integers(0, 3_000))
def test_places_stay_inside_the_segment(lengths: list[int], message_id: int, segment_bytes: int) -> None:
    """A table of places comes back as it was, or is refused because a buffer leaves the segment."""
    places = [(100 * index, nbytes) for index, nbytes in enumerate(lengths)]
    table = pack_places(message_id, places)
    head = pack_head(FrameKind.SHARED, b"{}", table, buffers=len(places), payload_bytes=sum(lengths))
    prefix = unpack_prefix(head, LIMITS)
    assert prefix.table_bytes == len(table)
    fits = all(offset + nbytes <= segment_bytes for offset, nbytes in places)
    if fits:
        assert unpack_places(table, prefix, segment_bytes) == (message_id, places)
    else:
        with pytest.raises(ProtocolViolation):
            unpack_places(table, prefix, segment_bytes)


@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), st.data())
def test_the_quick_way_for_one_buffer_is_the_slow_way(
    payload: bytes, header: dict[str, int], data: st.DataObject
) -> None:
    """A message of one buffer is packed as any other; a damaged one is left to the way that knows the errors."""
    encoded = encode_header(header)
    head = pack_head(FrameKind.MESSAGE, encoded, pack_lengths([len(payload)]), buffers=1, payload_bytes=len(payload))
    packet = pack_one(encoded, len(payload)) + payload
    assert packet == head + payload
    assert unpack_one(packet, LIMITS) == (header, bytearray(payload))
    place = data.draw(st.integers(0, PREFIX_BYTES - 1))
    damaged = bytearray(packet)
    damaged[place] ^= data.draw(st.integers(1, 255))
    assert unpack_one(bytes(damaged), LIMITS) is None
    assert unpack_one(packet[:place], LIMITS) is None


def _frame(header: dict[str, object], buffers: list[bytes]) -> bytes:
    encoded = encode_header(header)
    table = pack_lengths([len(buffer) for buffer in buffers])
    payload = b"".join(buffers)
    head = pack_head(FrameKind.MESSAGE, encoded, table, buffers=len(buffers), payload_bytes=len(payload))
    return head + payload


def _feed(reader: FrameReader, stream: bytes, chunk_bytes: int, acquire: Callable[[int], Lease]) -> list[object]:
    """Give the reader a stream in pieces of `chunk_bytes`; returns (header, buffers) of each whole frame."""
    frames: list[object] = []
    position = 0
    while True:
        while not reader.wanted:
            try:
                frame = reader.step(acquire)
            except PoolExhausted:
                continue
            if frame is not None:
                frames.append((decode_header(frame.header), [bytes(view) for view in frame.views]))
                if frame.lease is not None:
                    frame.lease.release()
        if position == len(stream):
            return frames
        nbytes = min(chunk_bytes, len(reader.wanted), len(stream) - position)
        reader.wanted[:nbytes] = stream[position : position + nbytes]
        reader.filled(nbytes)
        position += nbytes


messages = st.lists(
    st.tuples(
        st.dictionaries(st.text(max_size=5), st.integers(), max_size=2), st.lists(st.binary(max_size=90), max_size=8)
    ),
    max_size=4,
)


@given(messages, st.integers(1, 200), st.booleans())
def test_a_stream_cut_anywhere_gives_the_same_messages(
    sent: list[tuple[dict[str, object], list[bytes]]], chunk_bytes: int, stubborn: bool
) -> None:
    """However TCP cuts the stream, and although the pool refuses now and then, all messages arrive."""
    pool = Pool(memoryview(bytearray(4_096)))
    calls = iter(range(10**9))

    def acquire(nbytes: int) -> Lease:
        if stubborn and next(calls) % 2 == 0:
            raise PoolExhausted("not now")
        return pool.acquire(nbytes, 0.0)

    stream = b"".join(_frame(header, buffers) for header, buffers in sent)
    assert _feed(FrameReader(LIMITS), stream, chunk_bytes, acquire) == sent
    assert pool.statistics().leases == 0


@given(messages, st.data())
def test_a_damaged_stream_is_never_a_crash(
    sent: list[tuple[dict[str, object], list[bytes]]], data: st.DataObject
) -> None:
    """With bytes flipped anywhere the reader gives messages or one of our errors, and stays in its limits."""
    stream = bytearray(b"".join(_frame(header, buffers) for header, buffers in sent) + bytes(PREFIX_BYTES))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    largest: list[int] = [0]

    def acquire(nbytes: int) -> Lease:
        largest.append(nbytes)
        return Pool(memoryview(bytearray(nbytes + 64))).acquire(nbytes, 0.0)

    with contextlib.suppress(FabricError):
        _feed(FrameReader(LIMITS), bytes(stream), 64, acquire)
    assert max(largest) <= LIMITS.message_bytes + 64 * LIMITS.buffers


@contextlib.contextmanager
def _challenged() -> Iterator[tuple[Future[bytes], socket.socket, bytes]]:
    """What the listener's end of a greeting comes to, the client's socket, and the challenge that came over it."""
    one, other = socket.socketpair()
    with one, ThreadPoolExecutor(1) as threads, other:
        greeting = threads.submit(authenticate, one, SECRET, "tcp", Deadline(60.0))
        yield greeting, other, other.recv(CHALLENGE_BYTES)


def _proof(challenged: tuple[Future[bytes], socket.socket, bytes], response: bytes) -> bytes:
    """What the listener answers to a response, after which nothing comes."""
    greeting, other, _ = challenged
    other.sendall(response)
    other.shutdown(socket.SHUT_WR)
    return greeting.result(60.0)


def _introduced(challenge: bytes, scheme: Scheme = "tcp") -> tuple[Callable[[bytes], None], bytes]:
    """A client's check of the proof, and its response to a challenge."""
    one, other = socket.socketpair()
    with one, other:
        other.sendall(challenge)
        return introduce(one, SECRET, scheme, Deadline(60.0)), other.recv(RESPONSE_BYTES)


def test_reflection_replay_and_the_wrong_channel_fail() -> None:
    """A tag sent back to its maker, an old response and a response for another channel kind all fail."""
    with _challenged() as listener:
        check, response = _introduced(listener[2])
        with pytest.raises(AuthFailed):
            check(response[-PROOF_BYTES:])
        check(_proof(listener, response))
    with _challenged() as listener, pytest.raises(AuthFailed):
        _proof(listener, response)
    with _challenged() as listener, pytest.raises(AuthFailed):
        _proof(listener, _introduced(listener[2], "shm")[1])
    with _challenged() as listener, pytest.raises((AuthFailed, ProtocolViolation)):
        _proof(listener, listener[2] + bytes(PROOF_BYTES))


@given(st.binary(max_size=120))
@example(bytes(PROOF_BYTES))
def test_any_handshake_bytes_are_refused(data: bytes) -> None:
    """Arbitrary bytes never pass either side of the handshake."""
    with _challenged() as listener:
        check, _ = _introduced(listener[2])
        with pytest.raises(AuthFailed):
            check(data)
        with pytest.raises((AuthFailed, ProtocolViolation, PeerLost)):
            _proof(listener, data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp://",
        "tcp://host",
        "tcp://host:x",
        "tcp://host:70000",
        "http://a:1",
        "shm:",
        "tcp://:1",
        "tcp://192.0.2.1:0",
    ],
)
def test_bad_addresses_are_refused(text: str) -> None:
    """What is not an address says so, nor is another host's one to listen at."""
    with pytest.raises(BadAddress):
        listen(text, secret=SECRET)


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:0", "tcp://[::1]:9000", "shm:///run/x/s", "inproc://a/b"])
def test_addresses_survive(text: str) -> None:
    """An address prints as it was written."""
    assert str(Address.parse(text)) == text


def test_shm_folder_must_be_private(tmp_path: Path) -> None:
    """A socket is made 0600 in a folder of 0700; a folder that others may enter is refused."""
    with listen(f"shm://{tmp_path}/new/deep/s", secret=SECRET):
        assert (tmp_path / "new/deep").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "new/deep/s").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "new/deep/s").exists()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    for path in (tmp_path / "open/s", Path("relative/s"), tmp_path / ("x" * 200)):
        with pytest.raises(BadAddress):
            listen(f"shm://{path}", secret=SECRET)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(AddressInUse):
        listen(f"shm://{tmp_path}/file", secret=SECRET)
    assert (tmp_path / "file").read_text() == "precious"


def test_leftover_socket_is_replaced(tmp_path: Path) -> None:
    """The socket file of a listener that was killed does not stand in the way."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(tmp_path / "s"))
    assert (tmp_path / "s").exists()
    listen(f"shm://{tmp_path}/s", secret=SECRET).close()
