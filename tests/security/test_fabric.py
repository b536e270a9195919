"""Sockets between our own processes: what other servers unpickled from theirs."""

from __future__ import annotations

import ast
import io
import pickle
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fakes import ranking_model as kit
from fakes.trap import Payload
from plait_disagg.workers.hn import HnWorker
from plait_fabric import AuthFailed, Channel, FabricError, RecvTimeout, connect, listen, new_secret
from plait_fabric.transport.frames import FrameKind, pack_head, pack_lengths
from plait_fabric.values import Address
from plait_serving.deployments.fabric_endpoints import open_listeners

ROOT = Path(__file__).resolve().parents[2]
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle", "zmq",
              "multiprocessing"}  # fmt: skip
WAIT_S = 60.0


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "ran"


SECRET = new_secret()


@pytest.fixture
def worker() -> Iterator[HnWorker]:
    """The HN of a model, on TCP."""
    made = HnWorker(kit.CARD, {"": kit.FakeDense()}, [listen("tcp://127.0.0.1:0", secret=SECRET)])
    yield made
    made.stop(drain_s=0.5)


def payloads(mark: Path) -> list[bytes]:
    """The same in every form that a peer has sent to somebody."""
    torch_file = io.BytesIO()
    torch.save({"x": Payload(mark)}, torch_file)
    return [*(pickle.dumps(Payload(mark), protocol) for protocol in range(6)), torch_file.getvalue()]


def is_hung_up(peer: socket.socket) -> bool:
    """Whether the other side ends the connection."""
    peer.settimeout(WAIT_S)
    try:
        while peer.recv(65_536):
            pass
    except ConnectionResetError:
        pass
    return True


def end(channel: Channel) -> None:
    """Reads what the other side says until it hangs up."""
    with pytest.raises(FabricError) as caught:
        for _ in range(10):
            channel.recv(WAIT_S).release()
    assert not isinstance(caught.value, RecvTimeout)


def test_cve_2026_3059_and_cve_2026_3060_pickle_to_a_socket(worker: HnWorker, mark: Path) -> None:
    """SGLang's multimodal and encoder sockets unpickled what anybody sent: who has no key is hung up on after the first
    72 bytes, and none of them was parsed."""
    address = Address.parse(worker.addresses[0])
    for payload in payloads(mark):
        with socket.create_connection((address.target, address.port)) as peer:
            peer.sendall(payload.ljust(72, b"\0"))
            assert is_hung_up(peer)
    assert not mark.exists()
    assert worker.alive


def test_cve_2026_3989_pickle_from_a_peer_with_the_key(worker: HnWorker, mark: Path) -> None:
    """Not even the other half of the model may send code: as a header, a buffer, or a field of either."""
    for payload in payloads(mark):
        frames = [
            pack_head(FrameKind.MESSAGE, payload, b"", buffers=0, payload_bytes=0),
            pack_head(FrameKind.MESSAGE, b"{}", pack_lengths([len(payload)]), buffers=1, payload_bytes=len(payload))
            + payload,
            struct.pack("!Q", len(payload)) + payload,
        ]
        for frame in frames:
            channel = connect(worker.addresses[0], secret=SECRET, timeout_s=WAIT_S)
            channel._sock.sendall(frame)  # type: ignore[attr-defined]
            end(channel)
            channel.close()
        for header in ({"kind": "hello", "payload": payload.hex()}, {"kind": "dense", "crossing": [payload.hex()]}):
            with connect(worker.addresses[0], secret=SECRET, timeout_s=WAIT_S) as channel:
                channel.send(header, [payload])
                end(channel)
    assert not mark.exists()
    assert worker.alive


def test_cve_2026_7301_a_socket_on_every_address(tmp_path: Path) -> None:
    """SGLang's router was bound to 0.0.0.0 and asked for no key: our replicas listen on the address that Ray knows them
    by, and on files that nobody else can open."""
    listeners = open_listeners(SECRET, kind="rank", ip_address="127.0.0.1", folder=tmp_path / "sockets")
    try:
        local, remote = (Address.parse(listener.address) for listener in listeners)
        assert remote.target == "127.0.0.1"
        path = Path(local.target)
        assert path.parent.stat().st_mode & 0o077 == 0
        assert path.stat().st_mode & 0o077 == 0
        for listener in listeners:
            with pytest.raises(AuthFailed):
                connect(listener.address, secret=new_secret(), timeout_s=WAIT_S)
    finally:
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize("package", ["disagg/plait_fabric", "disagg/plait_disagg"])
def test_shadow_mq_no_unpickler_is_imported(package: str) -> None:
    """The class of all of these: pickle over ZeroMQ, copied from one server to the next. What speaks to sockets here
    imports nothing that could turn bytes into code."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0] for name in names}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile"), f"{path}:{node.lineno}"
    assert found
    assert found & UNPICKLERS == set()
