"""What carries a large message: the time to another process of this machine and back, by transport and size.

The peer sends a lease of the same size back (`bounce`), and so does this side, so that only the way is timed. `tcp` is
plait's channel over a TCP socket, which copies nothing of its own. `nixl` uses what UCX finds, which the row says: RDMA
if there is a device, else copies between address spaces; `nixl_tcp` may use TCP alone. Where NIXL is not installed, the
two are left out with the reason.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from plait_bench.benchmark import Metric, Reading, Rounds, Subject, Workload
from plait_bench.errors import SystemUnavailable
from plait_bench.fabric.peer import PEER_START_S, WAIT_S, spawned_peer
from plait_bench.summary import percentile
from plait_fabric import Channel, FabricOptions, Unsupported, listen, new_secret
from plait_fabric.transport.nixl_endpoint import load_nixl

WORKLOAD = "large-messages"
SIZES_BYTES = {"64KiB": 1 << 16, "256KiB": 1 << 18, "1MiB": 1 << 20, "13MB": 13_312_000}
"""13 MB: what crosses for a thousand candidates of MLPerf's DLRM-DCNv2 in float32, 13,312 bytes each."""
_SECONDS, _MIN_TRIPS, _WARM_UP = 0.5, 15, 5
_NIXL: Mapping[str, str] = {"nixl": "", "nixl_tcp": "tcp"}
_RDMA = Path("/sys/class/infiniband")


class Transports(Workload):
    """The median time there and back of each size."""

    name = WORKLOAD
    systems = ("tcp", "shm", *_NIXL)
    ours = "tcp"
    pairs = tuple(("tcp", system) for system in systems[1:])
    metrics: Mapping[str, Metric] = {"there_and_back_us": Metric(unit="us", better="lower")}

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the channel for each round."""
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
            scheme = system.partition("_")[0]
            if scheme == "nixl":
                _require_nixl()
            address = f"shm://{folder}/socket" if scheme == "shm" else f"{scheme}://127.0.0.1:0"
            options = FabricOptions(one_sided_from_bytes=1, nixl_transport=_NIXL.get(system, ""))
            yield Rounds(lambda _: _measured(address, options))


def _require_nixl() -> None:
    try:
        load_nixl()
    except Unsupported as error:
        raise SystemUnavailable(str(error)) from error


def _measured(address: str, options: FabricOptions) -> list[Reading]:
    secret = new_secret()
    with (
        listen(address, secret=secret, options=options) as listener,
        spawned_peer("bounce", listener.address, secret, options),
        listener.accept(PEER_START_S) as channel,
    ):
        return [
            Reading(
                workload=f"{WORKLOAD}-{size}",
                metric="there_and_back_us",
                value=_trip_us(channel, nbytes),
                layout=_carrier(address, options),
            )
            for size, nbytes in SIZES_BYTES.items()
        ]


def _carrier(address: str, options: FabricOptions) -> str:
    """Name what carries a message of this channel."""
    scheme = address.partition(":")[0]
    if scheme != "nixl":
        return scheme
    if options.nixl_transport:
        return f"UCX over {options.nixl_transport}"
    allowed = os.environ.get("UCX_TLS", "all")
    return f"UCX_TLS={allowed}, {'an RDMA device' if _RDMA.is_dir() and any(_RDMA.iterdir()) else 'no RDMA device'}"


def _trip_us(channel: Channel, nbytes: int) -> float:
    taken_us: list[float] = []
    until_s = time.perf_counter() + _SECONDS
    while len(taken_us) < _WARM_UP + _MIN_TRIPS or time.perf_counter() < until_s:
        lease = channel.pool.acquire(nbytes)
        began_s = time.perf_counter()
        channel.send({}, [lease])
        channel.recv(WAIT_S).release()
        taken_us.append((time.perf_counter() - began_s) * 1e6)
    return percentile(taken_us[_WARM_UP:], 0.5)
