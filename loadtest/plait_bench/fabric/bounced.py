"""Leases bounced by another process, by size: what carries a large message, and whether a modelled link keeps its own
time.

The peer sends a lease of the same size back (`bounce`), and so does this side, so that only the way is timed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from plait_bench.benchmark import Reading, Workload, percentile, readings
from plait_bench.errors import SystemUnavailable
from plait_bench.fabric.peer import bounce, channel_to, ping_pong
from plait_fabric import FabricOptions, Unsupported
from plait_fabric.link.link import Link
from plait_fabric.link.link_files import LINKS, read_links
from plait_fabric.transport.nixl_endpoint import load_nixl

MESSAGES_BYTES = {"64KiB": 1 << 16, "256KiB": 1 << 18, "1MiB": 1 << 20, "13MB": 13_312_000}
"""13 MB: what crosses for a thousand candidates of MLPerf's DLRM-DCNv2 in float32, 13,312 bytes each."""
_MESSAGE_S, _MIN_TRIPS, _WARM_UP = 0.5, 15, 5
_NIXL: Mapping[str, str] = {"nixl": "", "nixl_tcp": "tcp"}
_RDMA = Path("/sys/class/infiniband")

LEASES_BYTES = {"64B": 64, "1MiB": 1 << 20, "4MiB": 1 << 22, "16MiB": 1 << 24, "64MiB": 1 << 26}
FAR = "10g-far"
"""A link that does not ship: 10 Gb/s and 1 ms away, so that it exceeds the overhead of a host at all sizes."""
_LINKS = ("100g-same-switch", "100g-cross-pod", FAR)
_LEASE_S, _MIN_LEASES, _MAX_LEASES = 0.4, 11, 400


class Transports(Workload):
    """The median time there and back of each size, by transport.

    `tcp` is plait's channel over a TCP socket, which copies nothing of its own. `nixl` uses what UCX finds, which the
    row says: RDMA if there is a device, else copies between address spaces; `nixl_tcp` may use TCP alone. Where NIXL is
    not installed, the two are left out with the reason.
    """

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
            for size, nbytes in MESSAGES_BYTES.items():
                taken_s, _ = ping_pong(channel, nbytes, seconds=_MESSAGE_S, least=_WARM_UP + _MIN_TRIPS)
                median_us = percentile(taken_s[_WARM_UP:], 0.5) * 1e6
                found += readings({"there_and_back_us": median_us}, workload=f"{self.name}-{size}")
        return found


class ModelledLinks(Workload):
    """Ping-pongs over every link in real time, against its formula: the median of a run of each size, and the model's
    prediction.

    Runs over shared memory with leases, whose cost to the host is the same at all sizes. Half a round trip should be
    the modelled one-way time wherever that exceeds what the host needs; where it does not, the messages report that the
    host is slower, and so does the row.
    """

    name = "modelled-links"
    systems = ("plait", "model")
    metrics: Mapping[str, str] = {"one_way_us": "us"}

    def take(self, system: str, number: int) -> list[Reading]:
        """Measure all links, or compute them."""
        links = known_links()
        one = _modelled if system == "model" else _measured
        return [reading for name in _LINKS for reading in one(name, links[name])]


def known_links() -> dict[str, Link]:
    """Read the links that ship, and add `FAR`."""
    links = {name: sourced.link for name, sourced in read_links(LINKS).items()}
    near = links["100g-same-switch"]
    far = replace(near, name=FAR, alpha_s=1e-3, wire_s=1e-3, bytes_per_s=1.22e9, small_s_per_byte=1 / 1.22e9)
    return links | {FAR: far}


def _modelled(name: str, link: Link) -> list[Reading]:
    """Return the values of the link's formula."""
    return [
        Reading(workload=f"{name}-{size}", metric="one_way_us", value=link.one_way_s(nbytes) * 1e6, kind="modelled")
        for size, nbytes in LEASES_BYTES.items()
    ]


def _measured(name: str, link: Link) -> list[Reading]:
    """Measure a channel over the link."""
    found: list[Reading] = []
    with channel_to(bounce, link=link) as (channel, _):
        for size, nbytes in LEASES_BYTES.items():
            taken_s, late = ping_pong(channel, nbytes, seconds=_LEASE_S, least=_MIN_LEASES, most=_MAX_LEASES)
            one_way_us, share = percentile(taken_s, 0.5) / 2 * 1e6, late / (len(taken_s) + 1)
            remark = f"host slower in {share:.0%}" if late else ""
            found += readings({"one_way_us": one_way_us}, workload=f"{name}-{size}", layout=remark)
    return found
