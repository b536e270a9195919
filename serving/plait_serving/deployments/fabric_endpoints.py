"""How the processes of a deployment find each other on the fabric: where they listen, and what Serve reports of them.

Serve places and supervises replicas and hands out their addresses and secrets (each replica's `describe`, called on
all at once with `handle.broadcast`); everything that moves with each step or request goes over the fabric.
"""

from __future__ import annotations

import logging
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray import serve

from plait_fabric import Channel, FabricError, FabricOptions, Listener, MessageLimits, connect, listen
from plait_fabric.rpc.replicas import NoReplica, Replica, ReplicaLink, connect_to_one, worth_moving
from plait_serving.cores import remove_stale_sockets, socket_folder
from plait_serving.deployments.handles import ask
from plait_serving.deployments.ray_internals import known_replicas

_log = logging.getLogger(__name__)

FABRIC = FabricOptions(pool_bytes=1 << 30, limits=MessageLimits(message_bytes=1 << 30), inline_bytes=32_768)
"""Room for an SDXL step at 1024x1024 with 16 rows (54 MB each in fp16). It is only address space until it is used.

Most messages of ranking models fit into the control packet, which saves them a slot and its acknowledgement:
measured on 2 busy cores, a round trip of 20 KB took 330 to 390 us through a slot and 205 to 270 us without.
"""

_ASK_S = 5.0
"""How long a replica may take to describe itself, and then to be connected to."""


class ServeReplicas:
    """The replicas of one deployment as Serve knows them; the only place that calls its handle for this."""

    def __init__(self, what: str, handle: Any, *, chance: random.Random | None = None) -> None:
        """Take the deployment's name for messages as `what` and Serve's `handle`, which is not called yet."""
        self._what = what
        self._handle = handle
        self._chance = chance or random.Random()

    def connect(self, left_out: frozenset[str]) -> ReplicaLink:
        """Return a channel to a replica not in `left_out`. Blocks, usually for milliseconds. Raises `NoReplica`, and if
        there is no other one at once, so that a client may always look for more."""
        if left_out and (known := known_replicas(self._handle)) and known <= left_out:
            raise NoReplica("there is no other replica")
        return connect_to_one(self.replicas(), left_out, host=host_id(), chance=self._chance, dial=dial)

    def worth_moving(self, current: str) -> bool:
        """Return whether a client of replica `current` should move to another one. Raises `NoReplica`."""
        return worth_moving(self.replicas(), current, chance=self._chance)

    def replicas(self) -> list[Replica]:
        """Return the replicas that answer now. Raises `NoReplica` if Serve has none."""
        try:
            with ThreadPoolExecutor(1) as thread:  # results() refuses to block where a loop runs, as in a constructor
                answers = thread.submit(lambda: ask(self._handle, "describe", timeout_s=_ASK_S)).result()
        except Exception as error:  # Ray's and Serve's errors have no common base
            raise NoReplica(f"Serve knows no replica of {self._what}: {error}") from error
        found = [answer for answer in answers if isinstance(answer, Replica)]
        if not found:
            reasons = "; ".join(str(answer)[:200] for answer in answers)
            raise NoReplica(f"no replica of {self._what} describes itself: {reasons}")
        return found

    def answer(self) -> bool:
        """Return whether a replica answers now. Blocks."""
        try:
            return bool(self.replicas())
        except NoReplica:
            return False


def dial(address: str, secret: bytes) -> Channel:
    """Return a channel with `FABRIC`'s options. Raises `FabricError`."""
    return connect(address, secret=secret, timeout_s=_ASK_S, options=FABRIC)


def host_id() -> str:
    """Return a name shared by the processes of this machine and no other; it changes on reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def this_replica(addresses: tuple[str, ...], secret: bytes, *, channels: int, start_s: float) -> Replica:
    """Return what Serve tells others of the replica that this process is. For our own processes only."""
    return Replica(
        name=str(serve.get_replica_context().replica_id.to_full_id_str()),
        host=host_id(),
        addresses=addresses,
        secret=secret,
        channels=channels,
        pid=os.getpid(),
        start_s=start_s,
    )


def open_listeners(
    secret: bytes, *, kind: str, ip_address: str | None = None, folder: Path | None = None, between_hosts: str = "tcp"
) -> list[Listener]:
    """Listen on shared memory for clients on this machine (where that works) and on TCP for all others. Unset: the
    address of this node, and the folder of this user's sockets.

    `kind`: lower-case letters, the first word of the socket's name. `between_hosts` "nixl": on that too, for clients
    that have NIXL. Raises `Unsupported` if this process lacks it.
    """
    folder, ip_address = folder or socket_folder(), ip_address or ray.util.get_node_ip_address()
    remove_stale_sockets(folder)
    listeners: list[Listener] = []
    try:
        path = folder / f"{kind}-{os.getpid()}-{os.urandom(4).hex()}"
        listeners.append(listen(f"shm://{path}", secret=secret, options=FABRIC))
    except FabricError as error:
        _log.warning("no shared memory for %s clients, TCP only: %s", kind, error)
    host = f"[{ip_address}]" if ":" in ip_address else ip_address
    schemes = ("nixl", "tcp") if between_hosts == "nixl" else ("tcp",)
    if "nixl" in schemes:
        _log.info("NIXL for %s clients; UCX_TLS is %s", kind, os.environ.get("UCX_TLS", "unset: the best there is"))
    try:
        for scheme in schemes:
            listeners.append(listen(f"{scheme}://{host}:0", secret=secret, options=FABRIC))  # noqa: PERF401
    except FabricError:
        for listener in listeners:
            listener.close()
        raise
    return listeners
