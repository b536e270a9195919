"""Both ends of a channel that no listener made, so that a test has what carries it and sends what no channel sends."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from plait_fabric.memory.ring import RingReader, RingWriter
from plait_fabric.memory.segment import closing, map_segment
from plait_fabric.protocols import Channel
from plait_fabric.transport.shm import ShmChannel, segment_with_ring
from plait_fabric.transport.tcp import TcpChannel
from plait_fabric.values import FabricOptions, Scheme

__all__ = ["RawEnds", "flood", "hold", "raw_ends"]


@dataclass(frozen=True, kw_only=True)
class RawEnds:
    """Two connected ends. `send` puts bytes where the client's frames go, `notify_server` and `notify_client` where the
    other end's releases are told; `sock` is the client's."""

    client: Channel
    server: Channel
    sock: socket.socket
    send: Callable[[bytes], object]
    notify_server: Callable[[bytes], object]
    notify_client: Callable[[bytes], object]


@contextmanager
def raw_ends(scheme: Scheme, options: FabricOptions | None = None) -> Iterator[RawEnds]:
    """Yield the ends of a channel over shm, tcp or nixl, and close them."""
    make = {"shm": _over_shm, "tcp": _over_tcp, "nixl": _over_nixl}[scheme]
    ends = make(options or FabricOptions())
    with ends.client, ends.server:
        yield ends


def _over_tcp(options: FabricOptions) -> RawEnds:
    one, other = _sockets()
    return RawEnds(
        client=TcpChannel(one, "tcp://server", options),
        server=TcpChannel(other, "tcp://client", options),
        sock=one,
        send=one.send,
        notify_server=_nothing,
        notify_client=_nothing,
    )


def _over_shm(options: FabricOptions) -> RawEnds:
    controls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (first, of_first), (second, of_second) = segment_with_ring(options), segment_with_ring(options)
    with closing([of_first, of_second]):
        client = ShmChannel(
            control=controls[0], outgoing=first, incoming=map_segment(of_second), peer="shm server", options=options
        )
        server = ShmChannel(
            control=controls[1], outgoing=second, incoming=map_segment(of_first), peer="shm client", options=options
        )
    ring = RingWriter(first[: RingReader(first).nbytes])

    def send(packet: bytes) -> None:
        assert ring.put(packet)
        controls[0].send(b"!")

    return RawEnds(
        client=client,
        server=server,
        sock=controls[0],
        send=send,
        notify_server=_nothing,
        notify_client=_nothing,
    )


def _over_nixl(options: FabricOptions) -> RawEnds:
    from plait_fabric.transport.nixl import NixlChannel
    from plait_fabric.transport.nixl_endpoint import NixlEndpoint

    one, other = _sockets()
    ours, theirs = (NixlEndpoint(options.pool_bytes, transport=options.nixl_transport) for _ in range(2))
    ours.join(theirs.description())
    theirs.join(ours.description())
    return RawEnds(
        client=NixlChannel(one, "nixl://server", options, ours),
        server=NixlChannel(other, "nixl://client", options, theirs),
        sock=one,
        send=one.send,
        notify_server=ours.tell,
        notify_client=theirs.tell,
    )


def _sockets() -> tuple[socket.socket, socket.socket]:
    """Return two ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    return one, other


def _nothing(note: bytes) -> None:
    raise AssertionError(f"nothing is told in notes: {note!r}")


# ---- peers in a process of their own ---------------------------------------------------------------------------------


def hold(channel: Channel) -> None:
    """Say that the channel is there, and never receive."""
    channel.send({"ready": True})
    sys.stdin.read()


def flood(channel: Channel) -> None:
    """Send messages of 1 MiB until killed."""
    payload = bytes(1 << 20)
    for number in itertools.count():
        channel.send({"number": number}, [payload])
