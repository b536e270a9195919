"""What carries a large message: the time to another process of this machine and back, by transport and size.

The peer sends a lease of the same size back (`bounce`), and so does this side, so that only the way is timed. `tcp` is
plait's channel over a TCP socket, which copies nothing of its own. `nixl` uses what UCX finds, which the row says: RDMA
if there is a device, else copies between address spaces; `nixl_tcp` may use TCP alone. Where NIXL is not installed, the
two are left out with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from plait_bench.benchmark import Reading, Workload, percentile, readings
from plait_bench.errors import SystemUnavailable
from plait_bench.fabric.peer import bounce, channel_to, ping_pong
from plait_fabric import FabricOptions, Unsupported
from plait_fabric.transport.nixl_endpoint import load_nixl

SIZES_BYTES = {"64KiB": 1 << 16, "256KiB": 1 << 18, "1MiB": 1 << 20, "13MB": 13_312_000}
"""13 MB: what crosses for a thousand candidates of MLPerf's DLRM-DCNv2 in float32, 13,312 bytes each."""
_SECONDS, _MIN_TRIPS, _WARM_UP = 0.5, 15, 5
_NIXL: Mapping[str, str] = {"nixl": "", "nixl_tcp": "tcp"}
_RDMA = Path("/sys/class/infiniband")


class Transports(Workload):
    """The median time there and back of each size."""

    name = "large-messages"
    systems = ("tcp", "shm", *_NIXL)
    metrics: Mapping[str, str] = {"there_and_back_us": "us"}

    def layouts(self, system: str) -> Sequence[str]:
        """Return what carries a message. Raises `SystemUnavailable` without NIXL."""
        if not system.startswith("nixl"):
            return (system,)
        try:
            load_nixl()
        except Unsupported as error:
            raise SystemUnavailable(str(error)) from error
        if _NIXL[system]:
            return (f"UCX over {_NIXL[system]}",)
        device = "an RDMA device" if _RDMA.is_dir() and any(_RDMA.iterdir()) else "no RDMA device"
        return (f"UCX_TLS={os.environ.get('UCX_TLS', 'all')}, {device}",)

    def take(self, system: str, number: int) -> list[Reading]:
        """Open a channel, and time all sizes."""
        options = FabricOptions(one_sided_from_bytes=1, nixl_transport=_NIXL.get(system, ""))
        found: list[Reading] = []
        with channel_to(bounce, system.partition("_")[0], options=options) as (channel, _):
            for size, nbytes in SIZES_BYTES.items():
                taken_s, _ = ping_pong(channel, nbytes, seconds=_SECONDS, least=_WARM_UP + _MIN_TRIPS)
                median_us = percentile(taken_s[_WARM_UP:], 0.5) * 1e6
                found += readings({"there_and_back_us": median_us}, workload=f"{self.name}-{size}")
        return found
