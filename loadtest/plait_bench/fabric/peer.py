"""A peer in a process of its own, for measurements and for the conformance suites of the fabric.

It ends with its channel.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import numpy as np

from plait_bench.benchmark import started
from plait_fabric import new_secret
from plait_fabric.endpoints import connect, listen
from plait_fabric.errors import PeerLost
from plait_fabric.link.link import Link
from plait_fabric.link.modelled import modelled
from plait_fabric.protocols import Channel
from plait_fabric.values import FabricOptions

PEER_START_S = 60.0
WAIT_S = 60.0

Loop = Callable[[Channel], None]
"""What a peer does with its channel, until that ends: a function of a module, which the process imports."""


def echo(channel: Channel) -> None:
    """Send every message back."""
    while True:
        with channel.recv() as message:
            channel.send(message.header, message.buffers)


def bounce(channel: Channel) -> None:
    """Send a lease of the same size back without writing to it, and whether the message was late."""
    lease = channel.pool.acquire(0)
    while True:
        with channel.recv() as message:
            nbytes, late = sum(buffer.nbytes for buffer in message.buffers), message.delivery.host_slower
        if nbytes != lease.nbytes:
            lease.release()
            lease = channel.pool.acquire(nbytes)
        channel.send({"late": late}, [lease])
        lease = channel.pool.acquire(nbytes)  # for the next one, while nobody waits


def drain(channel: Channel) -> None:
    """Read every byte of every message; answer one with `end` in its header with what was read."""
    read_bytes, total = 0, 0
    while True:
        with channel.recv() as message:
            for buffer in message.buffers:
                total += int(np.frombuffer(buffer, np.uint64).sum())
                read_bytes += buffer.nbytes
            if message.header.get("end"):
                channel.send({"bytes": read_bytes, "sum": total % 2**64})
                read_bytes, total = 0, 0


def _run(loop: Loop, address: str, secret: bytes, options: FabricOptions, link: Link | None) -> None:
    with connect(address, secret=secret, options=options) as plain, suppress(PeerLost):
        loop(plain if link is None else modelled(plain, link))


@contextmanager
def spawned_peer(
    loop: Loop, address: str, secret: bytes, options: FabricOptions | None = None, link: Link | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the peer, over a modelled link if one is given; kill it (-9) at the end of the block if it still runs."""
    with started(_run, loop, address, secret, options or FabricOptions(), link) as process:
        yield process


@contextmanager
def channel_to(
    loop: Loop, scheme: str = "shm", *, options: FabricOptions | None = None, link: Link | None = None
) -> Iterator[tuple[Channel, int]]:
    """Open a channel to a new peer; yield it, and the peer's process id."""
    secret, options = new_secret(), options or FabricOptions()
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
        address = f"shm://{folder}/socket" if scheme == "shm" else f"{scheme}://127.0.0.1:0"
        with (
            listen(address, secret=secret, options=options) as listener,
            spawned_peer(loop, listener.address, secret, options, link) as peer,
            listener.accept(PEER_START_S) as channel,
        ):
            yield channel if link is None else modelled(channel, link), peer.pid


def ping_pong(
    channel: Channel, nbytes: int, *, seconds: float, least: int, most: float = math.inf
) -> tuple[list[float], int]:
    """Bounce a lease for so long and often; return the seconds from each delivery to the next, and in how many round
    trips a message was late.

    The time that a modelled channel spends between a delivery and the next send is not the link's, and the channel
    deducts it from that send.
    """
    delivered_s: list[float] = []
    late = 0
    lease = channel.pool.acquire(nbytes)
    until_s = time.perf_counter() + seconds
    while len(delivered_s) < least or (len(delivered_s) < most and time.perf_counter() < until_s):
        channel.send({}, [lease])
        lease = channel.pool.acquire(nbytes)  # for the next one, while this one is in flight
        answer = channel.recv(WAIT_S)
        delivered_s.append(time.perf_counter())
        late += answer.delivery.host_slower or bool(answer.header["late"])
        answer.release()
    lease.release()
    return [after_s - before_s for before_s, after_s in pairwise(delivered_s)], late


@contextmanager
def on_separate_cores(pid: int) -> Iterator[str]:
    """Pin this process to one core and process `pid` to another, if there are two; yield a remark on the placement.
    A scheduler that puts both on one core makes them take turns, which would not measure the fabric."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield "on one core"
        return
    os.sched_setaffinity(pid, cores[1:2])
    os.sched_setaffinity(0, cores[:1])
    try:
        yield "a core each"
    finally:
        os.sched_setaffinity(0, cores)
